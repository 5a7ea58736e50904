"""JSON texts that name their format and its version."""

import json
from dataclasses import dataclass
from typing import Any

from penstock.errors import PipelineError


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its name, the type that reads and writes it, and the type of its errors."""

    name: str
    version: int
    type_name: str
    error: type[PipelineError]
    remedy: str
    """The advice for a text of another version."""

    @property
    def header(self) -> dict[str, Any]:
        """The fields with which each text begins."""
        return {"format": self.name, "version": self.version}

    def parse(self, text: str) -> dict[str, Any]:
        """Return the values in the text; raise an error if its format or version differs."""
        if not isinstance(text, str):
            raise self.error(
                f"The text is a {type(text).__name__}. Give the contents of the file: "
                f"path.read_text(), or use {self.type_name}.load(path)."
            )
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise self.error(
                f"The text is not JSON: {exc}. Expected what {self.type_name}.to_json() wrote."
            ) from exc
        if not isinstance(values, dict) or values.get("format") != self.name:
            got = values.get("format") if isinstance(values, dict) else None
            raise self.error(
                f"The text is of the format {got!r}. Expected {self.name!r}, as "
                f"{self.type_name}.to_json() writes it."
            )
        if values.get("version") != self.version:
            raise self.error(
                f"The text is of version {values.get('version')!r}. This Penstock reads version "
                f"{self.version}: {self.remedy}, or read it with the Penstock that wrote it."
            )
        return values

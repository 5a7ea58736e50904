"""Turn docstrings into Markdown for mkdocstrings: they are written to be read in the source."""

import re
from typing import Any

import griffe

STEP = re.compile(r"\n(?=\[\d+\] )")
EXAMPLE = re.compile(r"^(>>> (?:.+\n?)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Keep numbered steps on lines of their own, and show examples as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of something that griffe has read."""
        if obj.docstring:
            text = STEP.sub("  \n", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```\n", text)

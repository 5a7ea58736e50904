"""Where the model of a run comes from: Penstock's own GPT, a Hugging Face folder, or a function."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from penstock.errors import OptionError
from penstock.training.checks import check_count
from penstock.training.gpt_sizes import SIZES, GptConfig

DEFAULT_SIZE = "small"
_DEFAULT_CONTEXT = 256
_GPT_ONLY = ("layers", "width", "heads")
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """A model of transformers, described by a config.json and perhaps with weights beside it."""

    path: str
    """A folder with a config.json, or a config.json alone."""
    context: int

    def __post_init__(self) -> None:
        check_count("context", self.context)

    @property
    def config_file(self) -> Path:
        path = Path(self.path)
        return path / "config.json" if path.is_dir() else path

    @property
    def has_weights(self) -> bool:
        """True if the folder has safetensors files; otherwise the first values are random."""
        return Path(self.path).is_dir() and any(Path(self.path).glob("*.safetensors"))

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json of the folder, if it has one."""
        found = Path(self.path) / "tokenizer.json"
        return found if found.is_file() else None

    @property
    def vocabulary(self) -> int | None:
        """The number of different tokens that the model knows, if its configuration says so."""
        size = self.read_config().get("vocab_size")
        return size if isinstance(size, int) else None

    @property
    def end_token(self) -> int | None:
        """The token between two documents, if the configuration names one."""
        named: Any = self.read_config().get("eos_token_id")
        end: Any = named[0] if isinstance(named, list) and named else named
        vocabulary = self.vocabulary
        if not isinstance(end, int) or (vocabulary is not None and end >= vocabulary):
            return None
        return end

    def read_config(self) -> dict[str, Any]:
        """Return what config.json says."""
        try:
            described = json.loads(self.config_file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise OptionError(
                f"--model is {self.path}, whose configuration cannot be read: {error}. Expected a "
                "folder as save_pretrained() of transformers writes it, or a config.json."
            ) from error
        if not isinstance(described, dict) or "model_type" not in described:
            raise OptionError(
                f"--model is {self.path}, whose configuration names no model_type. Expected a "
                "config.json of transformers."
            )
        return described

    def options(self) -> dict[str, str | int]:
        """Return the options that stand for this model."""
        return {"model": str(Path(self.path).absolute()), "context": self.context}

    def __str__(self) -> str:
        kind = self.read_config()["model_type"]
        values = "with its weights" if self.has_weights else "with random weights"
        return f"{self.path} ({kind}, {values})"


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A model that a function of the user returns: `module:function`."""

    name: str
    context: int

    def __post_init__(self) -> None:
        check_count("context", self.context)

    @property
    def vocabulary(self) -> None:
        """Unknown: the model is not looked into."""
        return None

    def options(self) -> dict[str, str | int]:
        """Return the options that stand for this model."""
        return {"model": self.name, "context": self.context}

    def __str__(self) -> str:
        return f"the model of {self.name}"


ModelSource: TypeAlias = GptConfig | HuggingFaceModel | OwnModel


def find_model(given: Mapping[str, Any]) -> ModelSource:
    """Return the model that the options `model`, `layers`, `width`, `heads`, `context` name."""
    name: str = given.get("model", "")
    if not name or name in SIZES:
        base = SIZES[name or DEFAULT_SIZE]
        return replace(
            base,
            num_layers=given.get("layers", base.num_layers),
            width=given.get("width", base.width),
            num_heads=given.get("heads", base.num_heads),
            context=given.get("context", base.context),
        )
    for option in _GPT_ONLY:
        if option in given:
            raise OptionError(
                f"--{option} is {given[option]}, but --model is {name}, which has its own. Leave "
                f"--{option} out: it is for the sizes {', '.join(SIZES)}."
            )
    if Path(name).exists():
        return _in_folder(name, given.get("context"))
    if ":" in name:
        return OwnModel(name, given.get("context", _DEFAULT_CONTEXT))
    close = difflib.get_close_matches(name.lower(), SIZES, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    raise OptionError(
        f"--model is {name!r}. {hint}Expected one of {', '.join(SIZES)}; a folder of Hugging Face "
        "or a config.json on this machine; or a function that returns a model, as module:function."
    )


def _in_folder(path: str, context: int | None) -> HuggingFaceModel:
    model = HuggingFaceModel(path, context or _DEFAULT_CONTEXT)
    if not model.config_file.is_file():
        raise OptionError(
            f"--model is {path}, which has no config.json. Expected a folder as save_pretrained() "
            "of transformers writes it."
        )
    described = model.read_config()
    lengths = [described[name] for name in _LENGTHS if isinstance(described.get(name), int)]
    longest = max(lengths, default=None)
    if context is None:
        return replace(model, context=min(_DEFAULT_CONTEXT, longest or _DEFAULT_CONTEXT))
    if longest is not None and context > longest:
        raise OptionError(
            f"--context is {context}, but the model in {path} reads at most {longest} tokens. "
            "Give a smaller --context."
        )
    return model

"""From texts to tokens and back: bytes, or what a tokenizer.json says."""

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import OptionError
from penstock.training.documents import Documents
from penstock.training.model_sources import HuggingFaceModel
from penstock.training.settings import TrainConfig


class AbstractTokens(ABC):
    """A way from texts to tokens."""

    @abstractmethod
    def encode(self, text: bytes) -> Sequence[int]:
        """Return the tokens of a text, which is in UTF-8."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of different tokens."""

    @property
    @abstractmethod
    def end(self) -> int | None:
        """The token after each document, if there is one."""


class ByteTokens(AbstractTokens):
    """Every byte is a token."""

    size = 256
    end = None

    def encode(self, text: bytes) -> Sequence[int]:
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class TokenizerFile(AbstractTokens):
    """The tokens of a tokenizer.json, as Hugging Face's tokenizers reads it."""

    def __init__(self, path: str | Path, end: int | None) -> None:
        tokenizers = import_module("tokenizers")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # It raises nothing more special.
            raise OptionError(
                f"the tokenizer {path} cannot be read: {error}. Expected a tokenizer.json of "
                "Hugging Face."
            ) from error
        self._end = end

    def encode(self, text: bytes) -> Sequence[int]:
        found = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        tokens: list[int] = found.ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text

    @property
    def size(self) -> int:
        count: int = self._tokenizer.get_vocab_size()
        return count

    @property
    def end(self) -> int | None:
        return self._end


def choose_tokens(config: TrainConfig) -> AbstractTokens:
    """Return the tokens of a run; raise an error if the model does not know all of them."""
    path = config.tokenizer_file
    end = config.model.end_token if isinstance(config.model, HuggingFaceModel) else None
    found = ByteTokens() if path is None else TokenizerFile(path, end)
    known = config.model.vocabulary
    if known is not None and found.size > known:
        what = "bytes" if path is None else str(path)
        raise OptionError(
            f"the tokens are {what}, of which there are {found.size}, but the model knows {known}. "
            "Give the --tokenizer that the model was made for."
        )
    return found


def tokenise(
    documents: Documents, tokens: AbstractTokens, *, vocabulary: int | None = None
) -> Tensor:
    """Return the tokens of all documents in a row, with the end token after each, if any.

    Raise an error if the model, which knows `vocabulary` of them, does not know one.
    """
    row = array("i")
    for part in documents.parts:
        row.extend(tokens.encode(part) if isinstance(part, bytes) else part)
        if tokens.end is not None:
            row.append(tokens.end)
    if row and not 0 <= min(row) <= max(row) < (vocabulary or math.inf):
        raise OptionError(
            f"the data, {documents.name}, has tokens from {min(row)} to {max(row)}, but the model "
            f"knows {vocabulary or 'none below 0'}. Give data for this model."
        )
    return torch.frombuffer(row, dtype=torch.int32) if row else torch.zeros(0, dtype=torch.int32)

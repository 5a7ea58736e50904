"""Random numbers that depend on a seed and a name, not on ranks or earlier draws."""

import hashlib

import torch
from torch import Tensor

from penstock.training.text import Text


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return the generator of random numbers for a seed and a name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


class Batches:
    """The batch of each step: any rank can make any of them, in any order."""

    def __init__(self, text: Text, *, context: int, batch: int, seed: int) -> None:
        self._tokens = torch.frombuffer(bytearray(text.data), dtype=torch.uint8)
        self._context, self._batch, self._seed = context, batch, seed

    def of(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a step, and the token that follows each of them."""
        generator = generator_for(self._seed, f"batch {step}")
        last = len(self._tokens) - self._context
        starts = torch.randint(last, (self._batch, 1), generator=generator)
        rows = self._tokens[starts + torch.arange(self._context + 1)].long()
        return rows[:, :-1], rows[:, 1:]

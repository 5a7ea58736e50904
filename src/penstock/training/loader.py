"""The batches of each step, which follow from a seed and the number of the step alone.

Tokens are packed into sequences without gaps:

    tokens     t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 …      --context is 4
    targets    t1 t2 t3 t4 | t5 t6 t7 t8 | t9 …         the token after each

In each epoch, the sequences have another order. So any rank can make any batch, and a training that
is resumed, on any number of ranks, sees what it would have seen.
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from penstock.errors import OptionError


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return the generator of random numbers for a seed and a name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


class Sequences:
    """Tokens, packed into sequences of one length."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._context)

    def rows(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sequences at some places, and the token that follows each of theirs."""
        starts = places.unsqueeze(1) * self._context
        rows = self._tokens[starts + torch.arange(self._context + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def split(self, share: float) -> tuple["Sequences", "Sequences"]:
        """Return the first sequences, and a share at the end, of at least one sequence."""
        held_out = max(1, round(share * len(self)))
        edge = (len(self) - held_out) * self._context
        return (
            Sequences(self._tokens[: edge + 1], self._context),
            Sequences(self._tokens[edge:], self._context),
        )


class Batches:
    """The batches that a training sees, in the order of its seed."""

    def __init__(self, sequences: Sequences, *, batch: int, seed: int) -> None:
        if not len(sequences):
            raise OptionError(
                "the data has no whole sequence to train on. Give more --data, or a smaller "
                "--context or --eval-share."
            )
        self._sequences, self._batch, self._seed = sequences, batch, seed
        self._order = lru_cache(maxsize=2)(self._make_order)

    def of(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a batch, counted from 0, and the token that follows each of them."""
        length = len(self._sequences)
        places = torch.arange(number * self._batch, (number + 1) * self._batch)
        epochs = places // length
        found = [
            self._order(epoch)[places[epochs == epoch] % length]
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        ]
        return self._sequences.rows(torch.cat(found))

    def _make_order(self, epoch: int) -> Tensor:
        generator = generator_for(self._seed, f"epoch {epoch}")
        return torch.randperm(len(self._sequences), generator=generator)


def held_out_batches(sequences: Sequences, batch: int) -> list[Tensor]:
    """Return the places of the sequences to evaluate on, in whole batches.

    The last batch is left out if it is not whole; if there is only one, it repeats sequences.
    """
    count = len(sequences)
    if not count:
        raise OptionError(
            "the data to evaluate on has no whole sequence. Give more --eval-data or a larger "
            "--eval-share, or a smaller --context."
        )
    if count < batch:
        return [torch.arange(batch) % count]
    return list(torch.arange(count // batch * batch).chunk(count // batch))

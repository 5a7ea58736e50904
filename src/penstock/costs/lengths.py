"""Microbatches by their lengths: how much work and memory they take."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

from penstock.costs.amounts import LARGEST_AMOUNT, shortened
from penstock.costs.plain_numbers import to_lists, to_plain
from penstock.errors import CostError, OptionError

Lengths: TypeAlias = Iterable[float | Iterable[float]]
"""By microbatch: its number of tokens, or those of each document packed in it."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that a document of some length takes: linear, quadratic, or a mix of both.

    Attention takes work that grows with the square of a document's length, all else work that grows
    with the length.

    >>> Work(per_token=2, per_square=0.5)(10)
    70.0
    """

    per_token: float = 1.0
    per_square: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_token", "per_square"):
            value = to_plain(name, getattr(self, name))
            if not 0 <= value <= LARGEST_AMOUNT:
                raise CostError(
                    f"{name} is {value}. Expected a number from 0 to {LARGEST_AMOUNT:g}."
                )
            object.__setattr__(self, name, value)
        if self.per_token == self.per_square == 0:
            raise CostError("per_token and per_square are both 0. Expected one above 0.")

    @classmethod
    def of_transformer(cls, width: int) -> "Work":
        """Return the work of transformer blocks of this width; a token alone takes about 1.

        In a block, the matrices take 24 * width² operations for each token, and attention takes
        4 * width for each pair of tokens. Causal attention that skips the masked half takes half.

        >>> Work.of_transformer(1024)(6144)
        12288.0
        """
        if not isinstance(width, int) or width < 1:
            raise CostError(f"width is {width!r}. Expected a whole number, at least 1.")
        return cls(1.0, 1 / (6 * width))

    def __call__(self, length: float) -> float:
        """Return the work of a document of `length` tokens."""
        return self.per_token * length + self.per_square * length**2


def to_work(option: str, text: str) -> Work:
    """Return the rule that two numbers give: the work per token and per squared length.

    >>> to_work("--work", "1,0.5")(2)
    4.0
    """
    parts = text.split(",")
    with suppress(ValueError):  # As text that is not a number, or a number that Work refuses.
        if len(parts) == 2 and all(float(part) <= LARGEST_AMOUNT for part in parts):
            return Work(*map(float, parts))
    raise OptionError(
        f"{option} is {shortened(text)!r}. Expected the work per token and per squared length, at "
        "least 0 and not both 0, such as 1,0.0002."
    )


def read_lengths(name: str, lengths: Any) -> list[tuple[float, ...]]:
    """Return the lengths of the documents in each microbatch, checked."""
    lengths = to_lists(lengths)
    if isinstance(lengths, str | bytes) or not isinstance(lengths, Iterable):
        raise CostError(f"{name} is {lengths!r}. Expected one length per microbatch: give a list.")
    found = []
    for mb, value in enumerate(map(to_lists, lengths)):
        several = isinstance(value, Iterable) and not isinstance(value, str | bytes)
        each = tuple(value) if several else (value,)
        found.append(tuple(check_length(f"{name}[{mb}]", one) for one in each))
        if not each:
            raise CostError(f"{name}[{mb}] is empty. Expected at least one document.")
    if not found:
        raise CostError(f"{name} is empty. Give the length of at least one microbatch.")
    return found


def check_length(name: str, length: Any) -> float:
    """Return a positive length."""
    value = to_plain(name, length)
    if not 0 < value < inf:
        raise CostError(f"{name} is {value}. Expected a positive, finite number of tokens.")
    if value > LARGEST_AMOUNT:
        raise CostError(f"{name} is {value}. Expected at most {LARGEST_AMOUNT:g} tokens.")
    return value


def scales_of(
    lengths: Any, measured_length: float | None, work: Work
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the factors of time and of memory for each microbatch.

    They are against a document of `measured_length`, or of the mean length of the microbatches.
    """
    microbatches = read_lengths("lengths", lengths)
    tokens = [sum(documents) for documents in microbatches]
    usual = sum(tokens) / len(tokens)
    if measured_length is not None:
        usual = check_length("measured_length", measured_length)
    if not isinstance(work, Work):
        raise CostError(f"work is {work!r}. Expected a penstock.costs.Work.")
    if not work(usual) > 0:
        raise CostError(
            f"By {work}, {usual:g} tokens take no work that can be counted. Expected longer "
            "microbatches, or more work per token."
        )
    times = tuple(sum(map(work, documents)) / work(usual) for documents in microbatches)
    return times, tuple(count / usual for count in tokens)

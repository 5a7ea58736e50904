"""Checks of the numbers that users give."""

from collections.abc import Iterable
from math import inf, nan
from numbers import Real
from typing import Any

from penstock.errors import CostError


def to_count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CostError(f"{name} is {value!r}. Expected a whole number, at least 1.")
    return value


def to_counts(name: str, values: Any) -> list[int]:
    """Return whole numbers in ascending order, each once; a single number is accepted too."""
    each = list(values) if isinstance(values, Iterable) else [values]
    if not each:
        raise CostError(f"{name} is empty. Give at least one whole number.")
    return sorted({to_count(name, value) for value in each})


def to_amount(name: str, value: Any, *, above_zero: bool = False) -> float:
    try:
        amount = float(value) if isinstance(value, Real) else nan
    except OverflowError:
        amount = inf
    if not 0 <= amount < inf or (above_zero and amount == 0):
        expected = "above 0" if above_zero else "that is not negative"
        raise CostError(f"{name} is {value!r}. Expected a finite number {expected}.")
    return amount

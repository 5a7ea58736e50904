"""Microbatches that differ: the factors by which each costs more or less than the table says."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, TypeAlias

from penstock.costs.plain_numbers import to_lists, to_plain
from penstock.errors import CostError

Row: TypeAlias = tuple[float, ...]
"""One factor for each microbatch; empty if all are alike."""
Rows: TypeAlias = tuple[Row, ...]
"""One row for each stage; empty if all microbatches are alike."""


def read_rows(name: str, values: Any, num_stages: int) -> Rows:
    """Return one row for each stage, given one row for all stages or one for each."""
    each = _several(name, values)
    if not each or not all(isinstance(value, Iterable) for value in each):
        return (row,) * num_stages if (row := read_row(name, each)) else ()
    if len(each) != num_stages:
        raise CostError(
            f"{name} has {len(each)} rows, but there are {num_stages} stages. Expected one number "
            "per microbatch, or one row of them per stage."
        )
    rows = tuple(read_row(f"{name}[{stage}]", row) for stage, row in enumerate(each))
    for stage, row in enumerate(rows):
        if not row:
            raise CostError(
                f"{name}[{stage}] is empty. Expected one number per microbatch in each row."
            )
        if len(row) != len(rows[0]):
            raise CostError(
                f"{name}[{stage}] has {len(row)} numbers, and {name}[0] has {len(rows[0])}. "
                "Expected one number per microbatch in each row."
            )
    return rows


def read_row(name: str, values: Any) -> Row:
    """Return one positive factor for each microbatch."""
    row = tuple(to_plain(f"{name}[{mb}]", value) for mb, value in enumerate(_several(name, values)))
    for mb, value in enumerate(row):
        if not 0 < value < inf:  # Also where the value is not a number (nan).
            raise CostError(f"{name}[{mb}] is {value}. Expected a positive, finite number.")
    return row


def check_agreement(time_scale: Rows, memory_scale: Row) -> None:
    """Raise an error unless both are for the same number of microbatches, if both are given."""
    if time_scale and memory_scale and len(time_scale[0]) != len(memory_scale):
        raise CostError(
            f"time_scale is for {len(time_scale[0])} microbatches, and memory_scale for "
            f"{len(memory_scale)}. Expected one number per microbatch in each."
        )


def check_microbatches(num_scaled: int | None, num_microbatches: int) -> None:
    """Raise an error if costs with scales are used for another number of microbatches."""
    if num_scaled not in (None, num_microbatches):
        raise CostError(
            f"The costs are for {num_scaled} microbatches of different sizes, but there are "
            f"{num_microbatches}. Give a length or scale for each, or none if all are alike."
        )


def _several(name: str, values: Any) -> Sequence[Any]:
    values = to_lists(values)
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise CostError(f"{name} is {values!r}. Expected one number per microbatch: give a list.")
    return tuple(values)

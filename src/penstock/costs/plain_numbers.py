"""Numbers of any type as plain Python numbers."""

from numbers import Real
from typing import Any

from penstock.errors import CostError


def to_lists(values: Any) -> Any:
    """Return an array or a tensor as lists of Python numbers, and anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def to_plain(name: str, value: float) -> float:
    """Return a Python number: sums of other types may round or overflow by rules of their own."""
    if not isinstance(value, Real):
        raise CostError(f"{name} is {value!r}. Expected a number.")
    try:
        as_float = float(value)
    except OverflowError:
        raise CostError(f"{name} is too large for a float. Use a larger unit.") from None
    return value if type(value) is int else as_float

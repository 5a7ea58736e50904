"""Numbers from users, checked and converted to floats."""

import math
from collections.abc import Iterable
from numbers import Real

from penstock.errors import CostError


def to_floats(name: str, values: Iterable[float], *, per: str) -> tuple[float, ...]:
    """Return `values` as floats, each finite and not negative, and with a finite sum."""
    if not isinstance(values, Iterable):
        raise CostError(f"{name} is {values!r}. Expected one number per {per}.")
    checked = tuple(to_float(f"{name}[{index}]", value) for index, value in enumerate(values))
    if sum(checked) == math.inf:
        raise CostError(f"The sum of {name} is infinite. Give them in a larger unit.")
    return checked


def to_float(name: str, value: float) -> float:
    if not isinstance(value, Real):
        raise CostError(f"{name} is {value!r}. Expected a number.")
    try:
        as_float = float(value)
    except OverflowError:  # A whole number that is too large.
        as_float = math.inf
    if not 0 <= as_float < math.inf:  # Also where the value is not a number (nan).
        raise CostError(f"{name} is {as_float}. Expected a finite number that is not negative.")
    return as_float

"""Conversion to whole numbers, for a solver that accepts no others."""

from collections.abc import Sequence
from fractions import Fraction
from math import floor, lcm
from typing import NamedTuple

_LARGEST_DENOMINATOR = 10_000
_CLOSE = 1e-12  # As a share of the largest value; below it a difference is rounding.


class Units(NamedTuple):
    """Values as numbers of one unit."""

    unit: float
    counts: tuple[int, ...]


def to_units(values: Sequence[float], most: int) -> Units:
    """Return `values` as whole numbers of one unit, exactly if that is possible.

    It is possible if they have a common unit of which the largest value is at most `most`.
    Otherwise the largest value is `most` units, and the others are rounded down.

    >>> to_units([0.5, 0.75, 0.0], most=1000)
    Units(unit=0.25, counts=(2, 3, 0))
    >>> to_units([2**0.5, 1.0], most=1000).counts
    (1000, 707)
    """
    largest = max(values, default=0.0)
    if largest == 0:
        return Units(1.0, (0,) * len(values))
    shares = [value / largest for value in values]
    near = [Fraction(share).limit_denominator(_LARGEST_DENOMINATOR) for share in shares]
    whole = lcm(*(fraction.denominator for fraction in near))
    is_exact = all(abs(a - b) <= _CLOSE for a, b in zip(near, shares, strict=True))
    if is_exact and whole <= most:
        return Units(largest / whole, tuple(int(fraction * whole) for fraction in near))
    return Units(largest / most, tuple(floor(share * most) for share in shares))

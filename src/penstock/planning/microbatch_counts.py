"""The numbers of microbatches that a batch may be cut into."""

from math import isqrt

_MOST_PER_RANK = 8  # With more, the bubble is small already, but every action has overhead.
_MOST_COUNTS = 6


def choose_counts(batch_size: int, num_ranks: int) -> list[int]:
    """Return the divisors of the batch size from the number of ranks to 8 times that.

    At most 6 are returned, evenly spread, with the smallest and the largest. If there is none, the
    nearest below and above are returned.

    >>> choose_counts(64, 4)
    [4, 8, 16, 32]
    >>> choose_counts(2, 4)
    [2]
    >>> choose_counts(101, 4)
    [1, 101]
    """
    counts = _divisors(batch_size)
    most = _MOST_PER_RANK * num_ranks
    within = [count for count in counts if num_ranks <= count <= most]
    if not within:
        below = [count for count in counts if count < num_ranks]
        above = [count for count in counts if count > most]
        return [*below[-1:], *above[:1]]
    if len(within) <= _MOST_COUNTS:
        return within
    last = len(within) - 1
    return [within[round(place * last / (_MOST_COUNTS - 1))] for place in range(_MOST_COUNTS)]


def larger_counts(batch_size: int, count: int) -> list[int]:
    """Return the divisors of the batch size above `count`, to make microbatches smaller."""
    return [larger for larger in _divisors(batch_size) if larger > count]


def _divisors(number: int) -> list[int]:
    small = [count for count in range(1, isqrt(number) + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)})

"""Show a place in an order, for error messages."""

from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.message import Rank

_AROUND = 4  # Actions shown on each side.


def excerpt(order: Sequence[Action], position: int) -> str:
    """Return the actions around `position`, which is marked; after the last it is `>end<`.

    >>> from penstock.ir import Forward
    >>> excerpt([Forward(0, mb) for mb in range(9)], 1)
    '0F0 >0F1< 0F2 0F3 0F4 0F5 …'
    """
    first, last = max(0, position - _AROUND), position + _AROUND + 1
    cells = [str(action) for action in order[first:last]]
    if position < len(order):
        cells[position - first] = f">{cells[position - first]}<"
    else:
        cells.append(">end<")
    return " ".join([*(["…"] * (first > 0)), *cells, *(["…"] * (last < len(order)))])


def locate(rank: int, position: int) -> str:
    """Return the text for a place in an order; positions are counted from 0."""
    return f"rank {rank}, position {position}"


def error_at(
    orders: Sequence[Sequence[Action]], rank: Rank, position: int, wrong: str, rule: str
) -> ScheduleError:
    """Return the error for an action that breaks a rule: where, what is wrong, and what to do."""
    return ScheduleError(
        f"{locate(rank, position)}: {wrong}\n  {excerpt(orders[rank], position)}\n{rule}"
    )

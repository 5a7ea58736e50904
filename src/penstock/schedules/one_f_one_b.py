"""1F1B. One stage per rank. Holds p microbatches at most. Bubble as GPipe. arXiv:2007.01045.

    p=3, m=4, F=B=1     [1] warm-up: p - rank forwards  [2] steady: B then F  [3] drain
    rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1     F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 2        F0 B0 F1 B1 F2 B2 F3 B3

Delays add up: every p microbatches wait for one message to go down and up the ranks.
"""

from collections.abc import Iterator
from functools import partial

from penstock.ir import Action, Backward, Forward, LazyOrders
from penstock.ir.lazy_orders import Order
from penstock.schedules.alternation import alternate
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times
from penstock.schedules.stamping import in_turn


def _bubble(shape: Shape, times: Times) -> float:
    p, m, _ = shape
    if p == 1:
        return 0.0
    return (p - 1) * times.total + (2 * (p - 1) * m / p + 2 * (p - 2)) * times.c


def alternating_order(shape: Shape, rank: int) -> Iterator[Action]:
    """Return the order of `rank`."""
    forwards = [Forward(rank, mb) for mb in range(shape.m)]
    backwards = [Backward(rank, mb) for mb in range(shape.m)]
    return alternate(forwards, backwards, ahead=shape.p - rank)


def alternating_stamps(shape: Shape, rank: int, order: Order) -> Iterator[int]:
    """Return the stamps of `rank`'s order, whose backwards may be split."""
    return in_turn(order, first=rank, ahead=shape.p - rank)


def _orders(shape: Shape) -> Orders:
    return LazyOrders(
        shape.p, partial(alternating_order, shape), partial(alternating_stamps, shape)
    )


one_f_one_b = Generator(
    name="1F1B",
    aliases=("OneFOneB", "PipeDream-Flush", "DAPPLE"),
    source="DAPPLE, arXiv:2007.01045; after PipeDream, arXiv:1806.03377; the term of c is fitted",
    bubble=Bubble(
        _bubble, "makespan", lambda shape, t: t.c == 0 or (shape.m % shape.p == 0 and shape.p > 1)
    ),
    peak=lambda shape: min(shape.m, shape.p),
    orders=_orders,
)

"""Interleaved zero bubble. Any number of stages per rank, in a loop. Memory as 1F1B if p
divides m, and a v-th of ZB-H1's bubble. With one stage per rank it is ZB-H1. arXiv:2401.10241.

    p=2, m=4, v=2, F=I=W=1     fewer forwards ahead than interleaved 1F1B; rank r puts off r W
    rank 0  0F0 0F1 2F0 2F1 .   2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 …
    rank 1  .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 …
"""

from collections.abc import Iterator
from functools import partial

from penstock.ir import Action, LazyOrders
from penstock.schedules.alternation import delay_weights
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, loop
from penstock.schedules.interleaved_1f1b import (
    forwards_ahead,
    interleave,
    interleaved_stamps,
)


def _order(shape: Shape, rank: int) -> Iterator[Action]:
    return delay_weights(interleave(shape, rank, per_rank=1), delay=rank)


def _orders(shape: Shape) -> Orders:
    return LazyOrders(
        shape.p, partial(_order, shape), partial(interleaved_stamps, shape, per_rank=1)
    )


interleaved_zero_bubble = Generator(
    name="InterleavedZeroBubble",
    aliases=("ZB1P-Interleaved",),
    source="Zero Bubble Pipeline Parallelism, arXiv:2401.10241 section 2.3, on a loop",
    placement=loop,
    stages_per_rank=2,
    takes_any_stages_per_rank=True,
    bubble=Bubble(
        lambda shape, t: (shape.p - 1) * (t.f + t.i - t.w) / shape.v,
        "makespan",
        lambda shape, t: t.c == 0 and t.w <= min(t.f, t.i) and shape.m >= shape.p,
    ),
    peak=lambda shape: min(shape.m * shape.v, forwards_ahead(shape, 0, per_rank=1)) / shape.v,
    orders=_orders,
)

"""Looped breadth-first. Any number of stages per rank. Holds all microbatches. arXiv:2211.05953.

    p=2, m=3, v=2, F=B=1 (stages 0 and 2 on rank 0, 1 and 3 on rank 1)
    rank 0  0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B0 2B1 2B2 0B0 0B1 0B2
    rank 1  .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2

All microbatches go through a stage before the next stage's turn, so that a stage's parameters are
needed without interruption: good with sharded data parallelism. Needs m >= p to keep ranks busy.
"""

from collections.abc import Iterator
from functools import partial

from penstock.ir import Action, Backward, Forward, LazyOrders
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, loop
from penstock.schedules.stamping import in_waves


def _order(shape: Shape, rank: int) -> Iterator[Action]:
    p, m, v = shape
    stages = range(rank, p * v, p)
    yield from (Forward(stage, mb) for stage in stages for mb in range(m))
    yield from (Backward(stage, mb) for stage in reversed(stages) for mb in range(m))


def _orders(shape: Shape) -> Orders:
    return LazyOrders(shape.p, partial(_order, shape), in_waves(shape))


looped_bfs = Generator(
    name="LoopedBFS",
    source="Breadth-First Pipeline Parallelism, arXiv:2211.05953",
    placement=loop,
    stages_per_rank=2,
    takes_any_stages_per_rank=True,
    bubble=Bubble(
        lambda shape, t: (shape.p - 1) * t.total / shape.v,
        "makespan",
        lambda shape, t: t.c == 0 and shape.m >= shape.p,
    ),
    peak=lambda shape: shape.m,
    orders=_orders,
)

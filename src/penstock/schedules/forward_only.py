"""Forwards only, for inference. Any number of stages per rank, in a loop. Holds nothing.

    p=3, m=3, v=1
    rank 0  F0 F1 F2
    rank 1     F0 F1 F2
    rank 2        F0 F1 F2

With several stages per rank, all microbatches go through a stage before the next stage's turn.
"""

from collections.abc import Iterator
from functools import partial

from penstock.ir import Forward, LazyOrders
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times, loop
from penstock.schedules.stamping import in_waves


def _bubble(shape: Shape, times: Times) -> float:
    """Return the time to fill the pipeline, plus a wait in each further round if m < p."""
    p, m, v = shape
    hop = times.f / v + times.c
    return (p - 1) * hop + (v - 1) * max(0.0, p * hop - m * times.f / v) * (p > 1)


def _order(shape: Shape, rank: int) -> Iterator[Forward]:
    p, m, v = shape
    return (Forward(stage, mb) for stage in range(rank, p * v, p) for mb in range(m))


def _orders(shape: Shape) -> Orders:
    return LazyOrders(shape.p, partial(_order, shape), in_waves(shape))


forward_only = Generator(
    name="ForwardOnly",
    aliases=("Inference",),
    source="the forward half of GPipe, arXiv:1811.06965",
    placement=loop,
    takes_any_stages_per_rank=True,
    bubble=Bubble(_bubble, "makespan"),
    peak=lambda shape: 1 / shape.v,
    orders=_orders,
)

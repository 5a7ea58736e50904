"""GPipe. One stage per rank. Holds all microbatches. Bubble as 1F1B. arXiv:1811.06965.

p=3, m=3, F=B=1     [1] all forwards  [2] all backwards
rank 0  F0 F1 F2 .  .  .  .  B0 B1 B2
rank 1     F0 F1 F2 .  .  B0 B1 B2
rank 2        F0 F1 F2 B0 B1 B2
"""

from collections.abc import Iterator
from functools import partial

from penstock.ir import Action, Backward, Forward, LazyOrders
from penstock.schedules.generator import Bubble, Generator, Orders, Shape
from penstock.schedules.stamping import in_waves


def _order(m: int, rank: int) -> Iterator[Action]:
    yield from (Forward(rank, mb) for mb in range(m))  # [1]
    yield from (Backward(rank, mb) for mb in range(m))  # [2]


def _orders(shape: Shape) -> Orders:
    return LazyOrders(shape.p, partial(_order, shape.m), in_waves(shape))


gpipe = Generator(
    name="GPipe",
    source="GPipe, arXiv:1811.06965",
    bubble=Bubble(lambda shape, t: (shape.p - 1) * (t.total + 2 * t.c), "makespan"),
    peak=lambda shape: shape.m,
    orders=_orders,
)

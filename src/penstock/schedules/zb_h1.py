"""ZB-H1. One stage per rank. Memory as 1F1B, a third of its bubble. arXiv:2401.10241 section 2.

p=3, m=4, F=I=W=1     1F1B, but rank r puts off r weight backwards
rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1     F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
"""

from collections.abc import Iterator
from functools import partial

from penstock.ir import Action, LazyOrders
from penstock.schedules.alternation import delay_weights
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times
from penstock.schedules.one_f_one_b import alternating_order, alternating_stamps


def _bubble(shape: Shape, times: Times) -> float:
    return (shape.p - 1) * (times.f + times.i - times.w + 4 * times.c)


def _holds(shape: Shape, times: Times) -> bool:
    has_enough = shape.m > shape.p or (shape.m == shape.p and times.c == 0)
    return has_enough and 2 * times.c <= times.w <= min(times.f, times.i)


def _order(shape: Shape, rank: int) -> Iterator[Action]:
    return delay_weights(alternating_order(shape, rank), delay=rank)


def _orders(shape: Shape) -> Orders:
    return LazyOrders(shape.p, partial(_order, shape), partial(alternating_stamps, shape))


zb_h1 = Generator(
    name="ZB-H1",
    source="Zero Bubble Pipeline Parallelism, arXiv:2401.10241 section 2.3",
    bubble=Bubble(_bubble, "makespan", _holds),
    peak=lambda shape: min(shape.m, shape.p),
    orders=_orders,
)

"""ZB-H2. One stage per rank. Twice the memory of 1F1B, and no bubble by span if F = I = W.

arXiv:2401.10241 section 2.

    p=3, m=6, F=I=W=1     rank r runs 2(p - r) - 1 forwards ahead and puts off 2r weight backwards
    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
    rank 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
"""

from collections.abc import Iterator
from functools import partial

from penstock.ir import Action, Backward, Forward, LazyOrders
from penstock.ir.lazy_orders import Order
from penstock.schedules.alternation import alternate, delay_weights
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times
from penstock.schedules.stamping import in_turn


def _bubble(shape: Shape, times: Times) -> float:
    return (shape.p - 1) * (times.f + times.i - 2 * times.w + 2 * times.c)


def _holds(shape: Shape, times: Times) -> bool:
    return shape.m >= 2 * shape.p - 1 and 2 * times.c <= times.w <= min(times.f, times.i)


def _order(shape: Shape, rank: int) -> Iterator[Action]:
    forwards = [Forward(rank, mb) for mb in range(shape.m)]
    backwards = [Backward(rank, mb) for mb in range(shape.m)]
    order = alternate(forwards, backwards, ahead=2 * (shape.p - rank) - 1)
    return delay_weights(order, delay=2 * rank)


def _stamps(shape: Shape, rank: int, order: Order) -> Iterator[int]:
    return in_turn(order, first=2 * rank, ahead=2 * (shape.p - rank) - 1)


def _orders(shape: Shape) -> Orders:
    return LazyOrders(shape.p, partial(_order, shape), partial(_stamps, shape))


zb_h2 = Generator(
    name="ZB-H2",
    source="Zero Bubble Pipeline Parallelism, arXiv:2401.10241 section 2.3",
    bubble=Bubble(_bubble, "span", _holds),
    peak=lambda shape: min(shape.m, 2 * shape.p - 1),
    orders=_orders,
)

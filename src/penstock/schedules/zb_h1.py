"""ZB-H1. One stage per rank. Memory as 1F1B, a third of its bubble. arXiv:2401.10241 section 2.

p=3, m=4, F=I=W=1     1F1B, but rank r puts off r weight backwards
rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1     F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
"""

from penstock.schedules.alternate import delay_weights
from penstock.schedules.base import Bubble, Generator, Orders, Shape
from penstock.schedules.one_f_one_b import one_f_one_b


def _orders(shape: Shape) -> Orders:
    for rank, order in enumerate(one_f_one_b.orders(shape)):
        yield delay_weights(order, delay=rank)


zb_h1 = Generator(
    name="ZB-H1",
    source="Zero Bubble Pipeline Parallelism, arXiv:2401.10241 section 2.3",
    bubble=Bubble(
        lambda shape, t: (shape.p - 1) * (t.f + t.i - t.w + 4 * t.c),
        "makespan",
        lambda shape, t: shape.m > shape.p or (shape.m == shape.p and t.c == 0),
    ),
    peak=lambda shape: min(shape.m, shape.p),
    orders=_orders,
)

"""Interleaved 1F1B with each rank's first stage one microbatch ahead. Hides the delays of one
round, p messages, for the memory of one more microbatch on one stage.

    p=2, m=4, v=2, F=B=1
    rank 0  0F0 0F1 0F2 2F0 2F1 0F3 2B0 2F2 2B1 2F3 0B0 …
    rank 1  .   1F0 1F1 1F2 3F0 3B0 3F1 3B1 1F3 1B0 3F2 …

In Megatron's order the second round of forwards waits for p messages that nothing hides. Here one
more forward runs in that time, which is long enough while p * c <= f / v.
These are the bubbles that arXiv:2401.10241 publishes for interleaved 1F1B (tables 5 and 6); by
the same clock, Megatron's order has p * c more. We do not know which order was used there.
"""

from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times, loop
from penstock.schedules.interleaved_1f1b import forwards_ahead, interleaved_orders

_LEAD = 1


def _bubble(shape: Shape, times: Times) -> float:
    p, _, v = shape
    return (p - 1) * times.total / v + (2 * v * p - p - 2) * times.c


def _holds(shape: Shape, times: Times) -> bool:
    p, m, v = shape
    is_hidden = p * times.c <= times.f / v and v * times.c <= times.i + times.w
    return m >= p and (times.c == 0 or (is_hidden and m % p == 0 and m > p > 1 and v > 1))


def _orders(shape: Shape) -> Orders:
    return interleaved_orders(shape, per_rank=2, lead=_LEAD)


interleaved_ahead = Generator(
    name="InterleavedAhead",
    source="Penstock, after Megatron-LM, arXiv:2104.04473 section 2.2",
    orders=_orders,
    placement=loop,
    stages_per_rank=2,
    takes_any_stages_per_rank=True,
    bubble=Bubble(_bubble, "makespan", _holds),
    peak=lambda shape: (
        min(shape.m * shape.v, forwards_ahead(shape, 0, per_rank=2) + _LEAD) / shape.v
    ),
)

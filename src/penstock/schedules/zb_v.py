"""ZB-V. Two stages per rank, in a V. Memory as 1F1B. No bubble by span if F = I = W.

arXiv:2401.10241 section 6.

    p=2, m=4, F=I=W=1 (stages 0 and 3 on rank 0, 1 and 2 on rank 1)
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 …
    rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 …

[1] Forwards of the first stage until the first microbatch is back. [2] Forwards of both stages.
[3] The second stage's backwards begin. [4] Steady: F, I, W of one stage, then of the other.
[5] I first, so that no other rank waits. [6] The remaining W.

The construction is for m >= 2p - 1. For fewer microbatches the rest are left out of it, and their
gaps are squeezed out; constructing it then still takes the time for 2p - 1 microbatches.
"""

from collections.abc import Iterator
from functools import partial

from penstock.ir import Action, LazyOrders
from penstock.ir.action import compute_parts
from penstock.ir.lazy_orders import Order
from penstock.schedules.building_block import squeezed
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times, v_shape
from penstock.schedules.squeezing import Layout, layout_of
from penstock.schedules.stamping import by_place
from penstock.schedules.writer import Writer


def _order(p: int, m: int, rank: int) -> list[Action]:
    down, up = rank, 2 * p - 1 - rank
    writer = Writer()
    for _ in range(2 * (p - rank) - 1):  # [1]
        writer.forward(down)
    for _ in range(rank):  # [2]
        writer.forward(up)
        writer.forward(down)
    for _ in range(p - rank):  # [3]
        _add_passes_up(writer, up)
    while writer.num_forwards[up] < m:  # [4]
        if writer.num_forwards[down] < m:
            writer.forward(down)
        writer.backward_input(down)
        writer.backward_weight()
        _add_passes_up(writer, up)
    for _ in range(rank):  # [5]
        writer.backward_input(down)
        writer.backward_input(up)
    for _ in range(p - rank):
        writer.backward_input(down)
        writer.backward_weight()
    writer.backward_weights()  # [6]
    return writer.order


def _add_passes_up(writer: Writer, up: int) -> None:
    writer.forward(up)
    writer.backward_input(up)
    writer.backward_weight()


def _orders(shape: Shape) -> Orders:
    p, m, _ = shape
    in_turn = by_place(per_rank=1, per_action=1)
    if m >= 2 * p - 1:
        return LazyOrders(p, partial(_order, p, m), in_turn)

    def lay_out(rank: int) -> Layout:
        return layout_of(shape, (a for a in full[rank] if compute_parts(a)[0].mb < m))

    def stamps(rank: int, order: Order) -> Iterator[int]:
        known = dict(zip(full[rank], in_turn(rank, full[rank]), strict=True))
        return (known[action] for action in order)

    full = LazyOrders(p, partial(_order, p, 2 * p - 1), in_turn)
    return squeezed(shape, lay_out, stamps)


def _holds(shape: Shape, times: Times) -> bool:
    return times.f == times.i >= times.w and times.c == 0 and shape.m >= 2 * shape.p - 1


zb_v = Generator(
    name="ZB-V",
    aliases=("ZBVZeroBubble",),
    source="Zero Bubble Pipeline Parallelism, arXiv:2401.10241 section 6",
    orders=_orders,
    placement=v_shape,
    stages_per_rank=2,
    bubble=Bubble(lambda shape, t: (shape.p - 1) * (t.f + t.i - 2 * t.w) / 2, "span", _holds),
    peak=lambda shape: min(shape.m, shape.p),
)

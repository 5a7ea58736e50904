"""DualPipeV. Two stages per rank, in a V. Forwards overlap backwards of other microbatches.

From DeepSeek's DualPipe, cut in half as described by Sea AI Lab. Needs m >= 2p.
Holds p + 1/2 microbatches: half a microbatch more than ZB-V, since an overlap holds both halves.

    p=2, m=4, all actions 1, overlaps too (stages 0 and 3 on rank 0, 1 and 2 on rank 1)
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 …
    rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 …

    rank r, its first stage "down", its second "up"
    [1] 2(p - r - 1) times F down           [5] p - r - 1 times B up, then F up with B down
    [2] r + 1 times F down, F up            [6] r + 1 times B up, B down; I in the second half
    [3] p - r - 1 times I up, W, F up       [7] p - r - 1 times W, I down
    [4] m - 2p + r + 1 times                [8] the W that are left
        F down with B up, F up with B down
"""

from functools import partial

from penstock.ir import Action, LazyOrders
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times, v_shape
from penstock.schedules.stamping import by_place
from penstock.schedules.writer import Writer


def _order(p: int, m: int, rank: int) -> list[Action]:
    down, up = rank, 2 * p - 1 - rank
    writer = Writer()
    for _ in range(2 * (p - rank - 1)):  # [1]
        writer.forward(down)
    for _ in range(rank + 1):  # [2]
        writer.forward(down)
        writer.forward(up)
    for _ in range(p - rank - 1):  # [3]
        writer.backward_input(up)
        writer.backward_weight()
        writer.forward(up)
    for turn in range(m - 2 * p + rank + 1):  # [4]
        if turn == 0 and rank == p - 1:  # Its first backward should not wait for a forward.
            writer.forward(down)
            writer.backward(up)
        else:
            writer.overlap(down, up)
        writer.overlap(up, down)
    for _ in range(p - rank - 1):  # [5]
        writer.backward(up)
        writer.overlap(up, down)
    for turn in range(2 * (rank + 1)):  # [6]
        add = writer.backward if turn <= rank else writer.backward_input
        add(up if turn % 2 == 0 else down)
    for _ in range(p - rank - 1):  # [7]
        writer.backward_weight()
        writer.backward_input(down)
    writer.backward_weights()  # [8]
    return writer.order


def _orders(shape: Shape) -> Orders:
    p, m, _ = shape
    return LazyOrders(p, partial(_order, p, m), by_place(per_rank=3, per_action=2))


def _bubble(shape: Shape, times: Times) -> float:
    backward = times.i + times.w
    pair = times.f + backward
    return (shape.p - 1) * (pair + backward - 3 * times.w) / 2


dual_pipe_v = Generator(
    name="DualPipeV",
    source="DeepSeek DualPipe, arXiv:2412.19437, in its V form",
    orders=_orders,
    placement=v_shape,
    stages_per_rank=2,
    min_microbatches=lambda shape: 2 * shape.p,
    bubble=Bubble(_bubble, "makespan", lambda shape, t: t.f == t.i >= t.w and t.c == 0),
    peak=lambda shape: shape.p + 0.5,
)

"""V-Min. Two stages per rank, in a V. A third of 1F1B's memory, about two thirds of its bubble.

arXiv:2405.15362. Holds (p + 4) // 3 microbatches at most, the least of all.

    p=2, m=4, F=I=W=1 (stages 0 and 3 on rank 0, 1 and 2 on rank 1)
    rank 0  0F0 .   .   3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 …
    rank 1  .   1F0 2F0 .   .   2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 …

The order is made for F = I = W; with other times it needs no more memory, but ranks wait in every
period, so that the bubble grows with m.
"""

from penstock.schedules.building_block import Block, passes_are_equal, repeat_block
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times, v_shape


def _orders(shape: Shape) -> Orders:
    p = shape.p
    shift = 2 if p % 3 == 0 else 0

    def block(rank: int) -> Block:
        return Block(
            forward_down=rank,
            forward_up=2 * p - 1 - rank,
            input_up=2 * p + shift + rank,
            input_down=4 * p + shift - 1 - rank,
        )

    return repeat_block(shape, block)


def _bubble(shape: Shape, times: Times) -> float:
    """Return about 4 passes per rank, where 1F1B has 6."""
    passes = 4 * shape.p - (3 if shape.p % 3 == 0 else 5) if shape.p > 1 else 0
    return passes * times.total / 6


v_min = Generator(
    name="V-Min",
    source="Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
    orders=_orders,
    placement=v_shape,
    stages_per_rank=2,
    bubble=Bubble(_bubble, "makespan", passes_are_equal),
    peak=lambda shape: min(shape.m, (shape.p + 4) // 3),
)

"""V-Half. Two stages per rank, in a V. Half of 1F1B's memory, about half of its bubble.

arXiv:2405.15362. Holds (p + 2) // 2 microbatches at most.

    p=2, m=4, F=I=W=1 (stages 0 and 3 on rank 0, 1 and 2 on rank 1)
    rank 0  0F0 .   .   3F0 0F1 3I0 3W0 3F1 0F2 .   0I0 3I1 0W0 3F2 …
    rank 1  .   1F0 2F0 .   .   1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 …

The order is made for F = I = W; with other times it needs no more memory, but ranks wait more.
"""

from penstock.schedules.building_block import Block, passes_are_equal, repeat_block
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times, v_shape


def _orders(shape: Shape) -> Orders:
    p = shape.p
    shift = 3 if p % 2 == 0 else 0

    def block(rank: int) -> Block:
        return Block(
            forward_down=2 * rank,
            forward_up=3 * p - 2 - rank,
            input_up=3 * p + shift + 2 * rank - 1,
            input_down=6 * p + shift - rank - 2,
        )

    return repeat_block(shape, block)


def _bubble(shape: Shape, times: Times) -> float:
    """Return about 13/4 passes per rank, where 1F1B has 6; the rest depends on p mod 4."""
    p = shape.p
    passes = (13 * p - (16, 17, 14, 19)[p % 4]) // 4 if p > 1 else 0
    return passes * times.total / 6


v_half = Generator(
    name="V-Half",
    source="Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
    orders=_orders,
    placement=v_shape,
    stages_per_rank=2,
    bubble=Bubble(_bubble, "makespan", passes_are_equal),
    peak=lambda shape: min(shape.m, (shape.p + 2) // 2),
)

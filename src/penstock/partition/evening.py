"""Even out the stages of a cut, where ranks have several.

The best cut of a loop or a V is not unique: often only one rank carries as much as the heaviest,
and the stages of the others may be very uneven. Most schedules run faster with even stages, so
layers are moved as long as that makes stages more even. Steps that the code cites:
[1] a layer moves from any stage to any other: all cuts between the two move by one layer, so that
    the stages in between keep the number of their layers;
[2] the sum of squares of the stages' loads must fall;
[3] no rank and no stage may become heavier than the heaviest was.
"""

from collections.abc import Iterator
from itertools import accumulate

from penstock.ir.placement import Placement
from penstock.partition.load import Limit, Load


def even_out(
    load: Load, limit: Limit, placement: Placement, starts: tuple[int, ...]
) -> tuple[int, ...]:
    """Return a cut with stages that are as even, or more so, within the same limits."""
    heaviest_stage = max(load.of_stages(starts))
    heaviest_rank = max(load.of_ranks(starts, placement))
    while True:
        for _, moved in sorted(_more_even(load, starts)):
            if (
                max(load.of_stages(moved)) <= heaviest_stage  # [3]
                and max(load.of_ranks(moved, placement)) <= heaviest_rank
                and max(limit.load.of_ranks(moved, placement)) <= limit.most
            ):
                starts = moved
                break
        else:
            return starts


def _more_even(load: Load, starts: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the cuts one move [1] away with a smaller sum of squares [2], and the change of it."""
    num_stages = load.num_stages
    bounds = (*starts, load.num_layers)

    def square(stage: int, start: int, end: int) -> int:
        sums = load.sums[stage]
        return (sums[bounds[stage + 1] + end] - sums[bounds[stage] + start]) ** 2

    own = [square(stage, 0, 0) for stage in range(num_stages)]
    for step in (1, -1):
        # The cuts `first` to `last` move: stage first - 1 gains a layer and stage `last` loses one,
        # or the other way round.
        inner = [square(stage, step, step) - own[stage] for stage in range(1, num_stages - 1)]
        between = [0, *accumulate(inner, initial=0)]
        for first in range(1, num_stages):
            if step < 0 and bounds[first] - bounds[first - 1] < 2:
                continue
            before = square(first - 1, 0, step) - own[first - 1]
            for last in range(first, num_stages):
                if step > 0 and bounds[last + 1] - bounds[last] < 2:
                    continue
                after = square(last, step, 0) - own[last]
                change = before + between[last] - between[first] + after
                if change < 0:
                    moved = [start + step for start in starts[first : last + 1]]
                    yield change, (*starts[:first], *moved, *starts[last + 1 :])

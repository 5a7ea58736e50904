"""The registered schedules with a given placement."""

from collections.abc import Iterator

from penstock.ir import Forward, Placement, Schedule
from penstock.schedules import REGISTRY
from penstock.schedules.generator import Shape


def registered(placement: Placement, num_microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """Yield every registered schedule that has this placement and a backward, with its name."""
    stages_per_rank, rest = divmod(placement.num_stages, placement.num_ranks)
    if rest:
        return
    shape = Shape(placement.num_ranks, num_microbatches, stages_per_rank)
    for generator in REGISTRY:
        takes = generator.takes_any_stages_per_rank or generator.stages_per_rank == shape.v
        if not takes or generator.placement(shape) != placement:
            continue
        if num_microbatches < generator.min_microbatches(shape):
            continue
        schedule = generator(num_ranks=shape.p, num_microbatches=shape.m, stages_per_rank=shape.v)
        if any(not isinstance(action, Forward) for action in schedule.orders[0]):
            yield generator.name, schedule

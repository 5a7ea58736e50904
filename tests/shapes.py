"""Shapes that a generator takes, and what they cost."""

from collections.abc import Sequence

from penstock import CostTable, Schedule
from penstock.schedules import Generator, Shape, Times


def shapes(
    generator: Generator,
    *,
    ranks: Sequence[int],
    microbatches: Sequence[int],
    stages_per_rank: Sequence[int] = (1, 2, 3, 4),
) -> list[Shape]:
    """All shapes of these sizes that `generator` takes."""
    takes_any = generator.takes_any_stages_per_rank
    chosen = stages_per_rank if takes_any else (generator.stages_per_rank,)
    every = [Shape(p, m, v) for p in ranks for v in chosen for m in microbatches]
    return [shape for shape in every if shape.m >= generator.min_microbatches(shape)]


def make(generator: Generator, shape: Shape) -> Schedule:
    return generator(num_ranks=shape.p, num_microbatches=shape.m, stages_per_rank=shape.v)


def uniform_costs(
    shape: Shape, times: Times, *, after_forward: float = 1.0, after_input: float = 1.0
) -> CostTable:
    """The costs that `times` stands for: those of a rank's whole share."""
    return CostTable.uniform(
        shape.p * shape.v,
        stages_per_rank=shape.v,
        forward=times.f,
        backward_input=times.i,
        backward_weight=times.w,
        delay=times.c,
        after_forward=after_forward,
        after_input=after_input,
    )

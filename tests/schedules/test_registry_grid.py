"""Every algorithm on shapes up to 16 ranks, 32 microbatches and 4 stages per rank.

For more than 4 ranks only `make fuzz` takes all of them. The others are those around which the
algorithms change: few microbatches, and next to a multiple of the number of ranks.
"""

import gc
from collections.abc import Iterator

import pytest

from fuzzing import IS_LONG
from penstock import Schedule, simulate
from penstock.passes import add_comms, remove_comms
from penstock.schedules import REGISTRY, Generator, Times
from shapes import make, shapes

every_generator = pytest.mark.parametrize("generator", REGISTRY, ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Millions of small values without a cycle: looking for one takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


def microbatches(p: int) -> list[int]:
    every = range(1, 33)
    if p <= 4 or IS_LONG:
        return list(every)
    return [m for m in every if m <= 3 or m == 32 or m % p in (0, 1, p - 1)]


@pytest.mark.fuzz
@pytest.mark.parametrize("p", range(1, 17))
@every_generator
def test_schedule_of_every_shape_verifies_runs_round_trips_and_costs_what_is_stated(
    generator: Generator, p: int
) -> None:
    assert generator.bubble is not None
    assert generator.peak is not None
    unit = Times()
    tried = shapes(generator, ranks=[p], microbatches=microbatches(p))
    assert tried
    for shape in tried:
        schedule = make(generator, shape)
        assert schedule == Schedule.from_csv(schedule.to_csv()), shape
        report = simulate(schedule)  # It verifies the schedule, and raises if ranks stall.
        assert generator.peak(shape) == pytest.approx(report.peak_memory, rel=1e-9), shape
        if generator.bubble.holds(shape, unit):
            idle = getattr(report, generator.bubble.clock) - report.ranks[0].busy
            assert generator.bubble.time(shape, unit) == pytest.approx(idle, abs=1e-9), shape


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@every_generator
def test_schedule_with_comms_verifies_round_trips_and_is_the_same_without(
    generator: Generator, p: int
) -> None:
    tried = shapes(generator, ranks=[p], microbatches=[1, 2, 3, 8, 15], stages_per_rank=[1, 3])
    for shape in tried:
        schedule = make(generator, shape)
        with_comms = add_comms(schedule)
        with_comms.verify()
        assert with_comms == Schedule.from_csv(with_comms.to_csv()), shape
        assert schedule == remove_comms(with_comms), shape
        assert with_comms.has_comms == (p > 1)


@pytest.mark.parametrize("p", range(1, 9))
@every_generator
def test_schedule_adds_up_microbatches_in_order(generator: Generator, p: int) -> None:
    for shape in shapes(generator, ranks=[p], microbatches=range(1, 17), stages_per_rank=[1, 2, 3]):
        assert make(generator, shape).adds_in_order, shape

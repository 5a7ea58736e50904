"""Every algorithm on the shapes around which algorithms change; on all of them in `make fuzz`."""

import gc
from collections.abc import Iterator

import pytest
from telling_shapes import telling_shapes

from penstock import Schedule, simulate
from penstock.passes import add_comms, remove_comms
from penstock.schedules import REGISTRY, Generator, Times
from shapes import make

every_generator = pytest.mark.parametrize("generator", REGISTRY, ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Many small values without a cycle: looking for one takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.fuzz
@every_generator
def test_schedule_of_every_shape_verifies_runs_round_trips_and_costs_what_is_stated(
    generator: Generator,
) -> None:
    assert generator.bubble is not None
    assert generator.peak is not None
    unit = Times()
    for shape in telling_shapes(generator):
        schedule = make(generator, shape)
        assert schedule == Schedule.from_csv(schedule.to_csv()), shape
        assert schedule.adds_in_order, shape
        report = simulate(schedule)  # It verifies the schedule, and raises if ranks stall.
        assert generator.peak(shape) == pytest.approx(report.peak_memory, rel=1e-9), shape
        if generator.bubble.holds(shape, unit):
            idle = getattr(report, generator.bubble.clock) - report.ranks[0].busy
            assert generator.bubble.time(shape, unit) == pytest.approx(idle, abs=1e-9), shape


@pytest.mark.fuzz
@every_generator
def test_schedule_with_comms_verifies_round_trips_and_is_the_same_without(
    generator: Generator,
) -> None:
    for shape in telling_shapes(generator):
        if shape.p > 4:
            break
        schedule = make(generator, shape)
        with_comms = add_comms(schedule)
        with_comms.verify()
        assert with_comms == Schedule.from_csv(with_comms.to_csv()), shape
        assert schedule == remove_comms(with_comms), shape
        assert with_comms.has_comms == (shape.p > 1)

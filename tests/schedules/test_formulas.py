"""The bubbles and memory that algorithms state are those that the simulator finds."""

from functools import cache
from itertools import product

import pytest

from fuzzing import IS_LONG
from penstock import CostTable, Schedule, schedules, simulate
from penstock.schedules import REGISTRY, Generator, Shape, Times
from shapes import make, shapes, uniform_costs

every_generator = pytest.mark.parametrize("generator", REGISTRY, ids=lambda each: each.name)

# Unit times are those of test_registry_grid.py.
TELLING_TIMES = [
    Times(2, 2, 1),
    Times(3, 2, 1),
    Times(1, 1, 1, 0.01),
    Times(3, 2, 1, 0.01),
    # Weights that take longer than other passes, passes that take no time, delays that stay seen.
    Times(1, 1, 2),
    Times(3, 1, 2),
    Times(1, 0, 1),
    Times(2, 2, 1, 5),
    Times(0.25, 8, 0.25, 1),
]
OTHER_TIMES = [
    Times(2, 3, 1),
    Times(4, 4, 3, 0.02),
    Times(2e9, 2e9, 2e9),
    Times(2e-9, 2e-9, 1e-9),
    Times(1, 1, 3),
    Times(1, 2, 2),
    Times(0, 1, 1),
    Times(1, 1, 0),
    Times(0, 0, 0),
    Times(2, 2, 2, 5),
    Times(8, 0, 1, 0.5),
    Times(8, 0.25, 1, 1),
]
TIMES = [*TELLING_TIMES, *OTHER_TIMES] if IS_LONG else TELLING_TIMES
RANKS = (1, 2, 3, 4, 5, 8) if IS_LONG else (1, 2, 3, 4)
MICROBATCHES = (1, 2, 3, 4, 5, 8, 9, 15, 16) if IS_LONG else (1, 3, 4, 5, 8, 9)


@cache
def schedules_of(generator_name: str) -> list[tuple[Shape, Schedule]]:
    generator = schedules.get(generator_name)
    tried = shapes(generator, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=(1, 2, 3))
    return [(shape, make(generator, shape)) for shape in tried]


@pytest.mark.fuzz
@every_generator
def test_bubble_is_the_simulated_idle_time_wherever_it_is_said_to_hold(
    generator: Generator,
) -> None:
    bubble = generator.bubble
    assert bubble is not None
    for times, (shape, schedule) in product(TIMES, schedules_of(generator.name)):
        if bubble.holds(shape, times):
            report = simulate(schedule, uniform_costs(shape, times))
            time = getattr(report, bubble.clock)
            for rank in report.ranks:
                # To the rounding of sums as long as the whole step.
                assert bubble.time(shape, times) == pytest.approx(
                    time - rank.busy, rel=0, abs=1e-12 * time
                ), (shape, times)


def test_bubble_that_counts_delays_holds_for_small_ones() -> None:
    for generator in REGISTRY:
        bubble = generator.bubble
        assert bubble is not None
        shape = Shape(4, 32, generator.stages_per_rank)
        counts_delays = bubble.time(shape, Times(c=0.01)) != bubble.time(shape, Times())
        assert counts_delays == bubble.holds(shape, Times(c=0.01)), generator


def test_bubble_holds_for_each_number_of_ranks_and_stages() -> None:
    """So that the test above tests something; small m is where most formulas fail."""
    for generator in REGISTRY:
        assert generator.bubble is not None
        for shape in shapes(generator, ranks=range(1, 17), microbatches=[32]):
            assert generator.bubble.holds(shape, Times(2, 2, 2)), (generator, shape)


@every_generator
def test_rank_never_holds_more_than_peak_whatever_is_left_after_input(generator: Generator) -> None:
    """As much as after the forward is what test_registry_grid.py has."""
    assert generator.peak is not None
    for shape, schedule in schedules_of(generator.name):
        costs = uniform_costs(shape, Times(3, 2, 1, 0.5), after_input=0.25)
        assert simulate(schedule, costs).peak_memory <= generator.peak(shape) * (1 + 1e-12), shape
        schedule.verify(costs=costs, memory=generator.peak(shape))


@pytest.mark.parametrize("p", [1, 2, 5])
def test_zb_h1_rank_holds_more_weights_and_fewer_activations_than_the_one_before(p: int) -> None:
    schedule = schedules.get("ZB-H1")(num_ranks=p, num_microbatches=2 * p)
    costs = CostTable.uniform(p, after_forward=34.0, after_input=20.0)
    expected = [(p - rank) * 34 + rank * 20 for rank in range(p)]
    assert expected == [rank.peak_memory for rank in simulate(schedule, costs).ranks]
    assert p * 34 == simulate(schedule, costs).peak_memory


@pytest.mark.parametrize("p", [1, 2, 5])
def test_zb_h2_rank_holds_more_weights_and_fewer_activations_than_the_one_before(p: int) -> None:
    schedule = schedules.get("ZB-H2")(num_ranks=p, num_microbatches=3 * p)
    costs = CostTable.uniform(p, after_forward=34.0, after_input=20.0)
    expected = [(2 * p - 2 * rank - 1) * 34 + 2 * rank * 20 for rank in range(p)]
    assert expected == [rank.peak_memory for rank in simulate(schedule, costs).ranks]
    assert (2 * p - 1) * 34 == simulate(schedule, costs).peak_memory


def test_zb_v_has_no_bubble_by_span_and_the_memory_of_1f1b() -> None:
    for p, m in ((1, 1), (4, 7), (4, 8), (7, 16)):
        report = simulate(schedules.get("ZB-V")(num_ranks=p, num_microbatches=m))
        assert 0 == report.bubble_by_span
        assert 3 * m == report.span
        assert p == report.peak_memory


# At p = 4, 8 and 9: the most microbatches that a rank holds, and its share of the bubble of 1F1B.
@pytest.mark.parametrize(
    ("name", "held", "share"), [("V-Half", (3, 5, 5), 0.6), ("V-Min", (2, 4, 4), 0.75)]
)
def test_v_schedule_has_its_share_of_the_memory_and_the_bubble_of_1f1b(
    name: str, held: tuple[int, ...], share: float
) -> None:
    for p, expected in zip((4, 8, 9), held, strict=True):
        for m in (p, 2 * p + 1, 32):
            report = simulate(schedules.get(name)(num_ranks=p, num_microbatches=m))
            assert expected == report.peak_memory
            one_f_one_b = simulate(schedules.get("1F1B")(num_ranks=p, num_microbatches=m))
            busy = 3 * m
            assert 0 < report.makespan - busy < share * (one_f_one_b.makespan - busy)


def test_dual_pipe_v_takes_as_long_as_its_authors_draw() -> None:
    schedule = schedules.get("DualPipeV")(num_ranks=4, num_microbatches=10)
    report = simulate(schedule, CostTable.uniform(8))  # F 1, backward 2, a pair 3.
    assert [60] * 4 == [rank.busy for rank in report.ranks]
    assert 66 == report.makespan

"""Plans from the costs of layers."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import penstock
from penstock import CostTable, LayerCost, Placement
from penstock.errors import CostError, ScheduleError

EFFORT = 0.02


def layers(times: list[float], *, parameters: float = 0.0, activations: float = 1.0) -> list:
    return [LayerCost(f"l{n}", time, parameters, activations) for n, time in enumerate(times)]


def make_plan(given: list, num_ranks: int, **options: Any) -> penstock.Plan:
    """A plan with a short search."""
    return penstock.plan(given, num_ranks, effort=EFFORT, **options)


def times_by_brute_force(
    times: list[float], num_ranks: int, counts: list[int], batch: int, overhead: float
) -> dict[tuple[int, Placement], float]:
    """The time of each shape; the layers are alike, so that there is one way to cut them."""
    found = {}
    placements = [Placement.loop(num_ranks, stages_per_rank=count) for count in (1, 2)]
    for count, placement in product(counts, [*placements, Placement.v(num_ranks)]):
        per_stage = len(times) // placement.num_stages
        stages = [
            sum(times[n * per_stage : (n + 1) * per_stage]) * batch / count / 3
            for n in range(placement.num_stages)
        ]
        each = [time + overhead for time in stages]
        costs = CostTable(
            forward=each,
            backward_input=each,
            backward_weight=each,
            backward=[2 * time + overhead for time in stages],
        )
        result = penstock.search(costs, num_ranks, count, placements=[placement], effort=EFFORT)
        found[count, placement] = result.time
    return found


def test_best_row_is_the_best_of_all_counts_and_placements() -> None:
    times, overhead = [3.0] * 4, 0.3
    plan = make_plan(
        layers(times),
        2,
        batch=8,
        mb_size=1,
        microbatches=[2, 4, 8],
        overhead=overhead,
        keep=10,
    )
    expected = times_by_brute_force(times, 2, [2, 4, 8], 8, overhead)
    assert min(expected.values()) == pytest.approx(plan.best.time)
    times = {(row.num_microbatches, row.placement): row.time for row in plan.rows}
    assert expected == pytest.approx(times)
    assert plan.lower_bound <= plan.best.time


def test_more_microbatches_are_better_only_without_overhead() -> None:
    question = {"batch": 16, "mb_size": 1, "microbatches": [2, 4, 8, 16], "stages_per_rank": 1}
    ideal = make_plan(layers([3.0] * 4), 2, **question)
    real = make_plan(layers([3.0] * 4), 2, **question, overhead=1.0)
    assert 16 == ideal.best.num_microbatches
    assert 4 == real.best.num_microbatches


def test_costs_are_in_proportion_to_the_size_of_a_microbatch() -> None:
    given = [LayerCost("a", 6.0, 5.0, 4.0), LayerCost("b", 3.0, 5.0, 2.0)]
    options = {"batch": 8, "stages_per_rank": 1, "bytes_per_parameter_byte": 2.0}
    [row] = make_plan(given, 2, mb_size=2, microbatches=[8], overhead=0.5, **options).rows
    assert (1.5, 1.0) == row.costs.forward == row.costs.backward_input == row.costs.backward_weight
    assert (2.5, 1.5) == row.costs.backward
    assert (2.0, 1.0) == row.costs.after_forward == row.costs.after_input
    assert (10.0, 10.0) == row.parameter_memory
    assert 1 == row.mb_size
    assert ("b",) == row.cut_points
    assert (0, 1) == row.partition.starts


def test_delay_is_that_of_every_message() -> None:
    [row] = make_plan(
        layers([3.0] * 2), 2, batch=4, mb_size=1, microbatches=4, stages_per_rank=1, delay=0.25
    ).rows
    assert (0.25,) == row.costs.delay


def test_memory_binds_and_parameters_count() -> None:
    question = {"batch": 8, "mb_size": 1, "microbatches": 8, "stages_per_rank": 1}
    free = make_plan(layers([3.0] * 4), 4, **question).best
    assert max(free.memory) > 2
    times = []
    for parameters in (0.0, 1.0):
        given = layers([3.0] * 4, parameters=parameters)
        row = make_plan(given, 4, **question, memory=6).best
        assert 4 * parameters == row.parameter_memory[0]
        assert max(row.memory) <= 6
        times.append(row.time)
    assert free.time <= times[0] < times[1]


def test_cut_gives_way_to_memory() -> None:
    # By time alone the cut is in the middle, but the last layer holds nearly all parameters.
    given = [LayerCost(f"l{n}", 3.0, 10.0 if n == 3 else 1.0, 1.0) for n in range(4)]
    question = {"batch": 4, "mb_size": 1, "microbatches": 4, "stages_per_rank": 1}
    options = {"bytes_per_parameter_byte": 1.0}
    assert ("l2",) == make_plan(given, 2, **question, **options).best.cut_points
    tight = make_plan(given, 2, **question, **options, memory=11)
    assert ("l3",) == tight.best.cut_points
    assert max(tight.best.memory) <= 11


def test_cut_leaves_room_for_microbatches_where_that_is_faster() -> None:
    # The cut by time fits, but leaves the first rank room for one microbatch only.
    given = [LayerCost(f"l{n}", 3.0, 4.0 if n < 2 else 0.0, 1.0) for n in range(6)]
    options = {"bytes_per_parameter_byte": 1.0, "stages_per_rank": 1, "memory": 12}
    plan = make_plan(given, 2, batch=8, mb_size=1, microbatches=8, **options)
    assert plan.num_considered > 1
    assert ("l2",) == plan.best.cut_points
    assert max(plan.best.memory) <= 12


def test_cut_of_two_stages_per_rank_leaves_room_too() -> None:
    given = [LayerCost(f"l{n}", 3.0, 4.0 if n < 2 else 0.0, 1.0) for n in range(8)]
    options = {"bytes_per_parameter_byte": 1.0, "stages_per_rank": 2}
    question = {"batch": 8, "mb_size": 1, "microbatches": 8}
    by_time = make_plan(given, 2, **question, **options).best
    assert max(by_time.memory) > 14
    plan = make_plan(given, 2, **question, **options, memory=14)
    assert by_time.cut_points not in [row.cut_points for row in plan.rows]
    assert plan.best.time <= by_time.time
    assert max(plan.best.memory) <= 14


def test_lightest_cut_is_taken_where_no_cut_by_time_fits() -> None:
    # With three stages per rank, cuts are sought by time, and memory is only checked.
    times, parameters = [1.0, 1, 3, 3, 3, 3, 3], [10.0, 10, 0, 10, 0, 10, 0]
    given = [
        LayerCost(f"l{n}", time, size, 1.0)
        for n, (time, size) in enumerate(zip(times, parameters, strict=True))
    ]
    question = {"batch": 4, "mb_size": 1, "microbatches": 4, "stages_per_rank": 3}
    options = {"bytes_per_parameter_byte": 1.0}
    free = make_plan(given, 2, **question, **options, keep=1)
    assert max(free.best.parameter_memory) == 40
    tight = make_plan(given, 2, **question, **options, memory=36)
    assert 2 == len(tight.rows)  # A loop and a V.
    assert all(max(row.memory) <= 36 for row in tight.rows)


def test_fewer_rows_are_the_best_of_more() -> None:
    given = layers([3.0, 4.0, 2.0, 5.0, 3.0, 1.0])
    question = {"batch": 8, "mb_size": 1, "microbatches": [2, 4, 8], "overhead": 0.2}
    few, many = (make_plan(given, 2, **question, keep=keep) for keep in (1, 9))
    assert 1 == len(few.rows)
    assert 9 == len(many.rows)
    assert many.best.time == few.best.time
    times = [row.time for row in many.rows]
    assert sorted(times) == times


def test_larger_counts_are_tried_if_nothing_else_fits() -> None:
    # Up to 16 microbatches are tried for 2 ranks; with 32, a rank holds 1 sample of 2 layers.
    plan = make_plan(layers([3.0] * 4), 2, batch=32, mb_size=1, memory=2, stages_per_rank=1)
    assert [32] == [row.num_microbatches for row in plan.rows]
    assert [2, 4, 8, 16] == [choice.num_microbatches for choice in plan.left_out]


def test_layers_that_share_a_name_are_in_one_stage() -> None:
    names = ["a", "b", "b", "", "c"]
    given = [LayerCost(name, 3.0, 0.0, 1.0) for name in names]
    plan = make_plan(given, 3, batch=3, mb_size=1, stages_per_rank=1)
    assert ("b", "c") == plan.best.cut_points
    assert (3.0, 9.0, 3.0) == plan.best.partition.costs


def test_what_cannot_be_run_is_left_out_with_its_reason() -> None:
    plan = make_plan(layers([3.0] * 3), 2, batch=8, mb_size=1, microbatches=[3, 4])
    assert [(4, Placement.linear(2))] == [(r.num_microbatches, r.placement) for r in plan.rows]
    reasons = {(out.num_microbatches, out.placement): out.reason for out in plan.left_out}
    assert "a batch of 8 cannot be cut into 3 equal microbatches" == reasons[3, Placement.linear(2)]
    assert "3 layers cannot be cut into 4 stages" == reasons[4, Placement.v(2)]
    assert 5 == len(reasons)


def test_what_does_not_fit_is_left_out_with_what_it_needs() -> None:
    options = {"microbatches": [2, 4], "stages_per_rank": 1, "memory": 2}
    plan = make_plan(layers([3.0] * 2), 2, batch=8, mb_size=1, **options)
    assert [4] == [row.num_microbatches for row in plan.rows]
    [out] = plan.left_out
    assert "a rank needs 4 of memory even with one microbatch at a time" == out.reason


def test_nothing_fits_names_the_least_memory_and_its_cut() -> None:
    given = layers([3.0] * 4, parameters=1.0)
    question = {"batch": 4, "mb_size": 1, "microbatches": [2, 4], "stages_per_rank": 1}
    with pytest.raises(ScheduleError, match="No plan fits: memory is 9 on each rank") as info:
        make_plan(given, 2, **question, memory=9)
    assert (
        "The smallest found that fits is 10: with 4 microbatches of 1, linear, cut at l2. "
        "Allow that, or use more ranks." in str(info.value)
    )
    assert 10 == max(make_plan(given, 2, **question, memory=10).best.memory)
    with pytest.raises(ScheduleError, match="or use more ranks or more microbatches"):
        make_plan(given, 2, batch=4, mb_size=1, microbatches=[2], memory=1)


def test_no_plan_at_all_lists_the_reasons() -> None:
    message = (
        "There is no plan: 2 layers cannot be cut into 4 stages; 2 layers cannot be cut into 8 "
        "stages. Give other microbatches, fewer ranks"
    )
    with pytest.raises(ScheduleError, match=message):
        make_plan(layers([3.0] * 2), 4, batch=4, mb_size=1)


def test_one_rank_has_no_bubble() -> None:
    plan = make_plan(layers([3.0] * 2), 1, batch=4, mb_size=1, memory=100)
    assert 0.0 == plan.best.bubble
    assert 24.0 == plan.best.time


def test_same_question_gets_the_same_answer() -> None:
    given = layers([3.0, 4.0, 2.0, 5.0, 3.0, 1.0], parameters=0.5)
    first, second = (
        make_plan(given, 2, batch=8, mb_size=1, memory=25, overhead=0.1) for _ in range(2)
    )
    assert first.is_complete
    assert str(first) == str(second)
    for one, other in zip(first.rows, second.rows, strict=True):
        assert one.schedule == other.schedule
        assert one.cut_points == other.cut_points


def test_time_budget_is_kept_and_said() -> None:
    given = layers([3.0 + n % 3 for n in range(16)])
    plan = make_plan(given, 4, batch=32, mb_size=1, memory=5, seconds=0.01)
    assert not plan.is_complete
    assert "(stopped by its time budget)" in str(plan)
    assert plan.rows


@pytest.mark.parametrize(
    ("name", "value"),
    [("time", "x"), ("parameter_bytes", float("nan")), ("time", 10**400)],
)
def test_layer_whose_costs_are_no_amounts_is_rejected(name: str, value: Any) -> None:
    bad = replace(layers([3.0])[0], **{name: value})
    with pytest.raises(CostError, match=rf"layers\[0\]\.{name} is .*Expected a finite number"):
        make_plan([bad, *layers([3.0] * 3)], 2, batch=8, mb_size=1)

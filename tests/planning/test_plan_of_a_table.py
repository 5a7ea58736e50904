"""Plans for stages that are given with their costs."""

from dataclasses import replace

import pytest

import penstock
from penstock import CostTable, Placement
from penstock.errors import ScheduleError

EFFORT = 0.02


def table(num_stages: int = 2) -> CostTable:
    return CostTable.uniform(
        num_stages,
        forward=2.0,
        backward_input=3.0,
        backward_weight=0.5,
        backward=5.0,
        after_forward=4.0,
        after_input=2.0,
        delay=0.25,
        message_bytes=8.0,
        bandwidth=16.0,
        overlap_saving=0.5,
    )


def test_costs_scale_with_the_size_of_a_microbatch_and_overhead_does_not() -> None:
    [row] = penstock.plan(
        table(), 2, batch=16, mb_size=4, microbatches=8, overhead=1.0, effort=EFFORT
    ).rows
    costs = row.costs
    assert (1.5, 1.5) == costs.forward  # 1 + (2 - 1) / 2
    assert (2.0, 2.0) == costs.backward_input
    assert (0.5, 0.5) == costs.backward_weight  # No more than all of it is overhead.
    assert (3.0, 3.0) == costs.backward
    assert (1.5, 1.5) == costs.recompute
    assert (2.0, 2.0) == costs.after_forward
    assert (1.0, 1.0) == costs.after_input
    assert ((0.25,), (4.0,), (16.0,), 0.5) == (
        costs.delay,
        costs.message_bytes,
        costs.bandwidth,
        costs.overlap_saving,
    )


def test_delay_is_at_least_the_one_given() -> None:
    rows = [
        penstock.plan(
            table(), 2, batch=4, mb_size=1, microbatches=4, delay=delay, effort=EFFORT
        ).best
        for delay in (0.1, 0.5)
    ]
    assert [(0.25,), (0.5,)] == [row.costs.delay for row in rows]


def test_number_of_stages_decides_the_placements() -> None:
    options = {"batch": 4, "mb_size": 1, "microbatches": 4, "effort": EFFORT}
    assert {Placement.linear(2)} == {r.placement for r in penstock.plan(table(), 2, **options).rows}
    assert {Placement.v(2), Placement.loop(2, stages_per_rank=2)} == {
        row.placement for row in penstock.plan(table(4), 2, **options).rows
    }


def test_stages_are_as_given_and_the_schedule_is_that_of_a_search() -> None:
    costs = table()
    row = penstock.plan(costs, 2, batch=4, mb_size=1, microbatches=4, effort=EFFORT).best
    assert row.partition is None
    assert () == row.cut_points
    assert {} == row.split_spec
    assert costs == row.costs
    assert penstock.search(costs, 2, 4, effort=EFFORT).time == row.time


def test_memory_is_for_activations() -> None:
    options = {"batch": 4, "mb_size": 1, "microbatches": [2, 4], "effort": EFFORT}
    plan = penstock.plan(table(), 2, **options, memory=4)
    assert (4.0, 4.0) == plan.best.memory
    assert [2] == [out.num_microbatches for out in plan.left_out]
    with pytest.raises(
        ScheduleError, match="smallest found that fits is 4: with 4 microbatches of 1, linear"
    ):
        penstock.plan(table(), 2, **options, memory=3.9)


def test_stages_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ScheduleError, match="3 stages, which cannot be divided evenly among 2"):
        penstock.plan(table(3), 2, batch=4, mb_size=1)


def test_forwards_are_recomputed_if_the_costs_say_what_that_needs() -> None:
    costs = replace(table(4), after_dropping=(0.5,) * 4)
    options = {"batch": 8, "mb_size": 1, "microbatches": 8, "effort": EFFORT, "memory": 8.0}
    plain, best = (penstock.plan(one, 4, **options).best for one in (table(4), costs))
    assert "R" not in plain.schedule.to_csv()
    assert "R" in best.schedule.to_csv()
    assert best.time < plain.time
    # A microbatch holds 8 on both stages of a rank, unless it is dropped on the first.
    short = options | {"memory": 7.0}
    with pytest.raises(ScheduleError, match=r"memory is 7 on each rank\. The smallest found"):
        penstock.plan(table(4), 2, **short)
    assert "R" in penstock.plan(costs, 2, **short).best.schedule.to_csv()
    counts = best.recomputed
    assert best.schedule.to_csv().count("R") == sum(counts)
    assert any(f"{count} of 8" in best.sentences[0] for count in counts if count)


def test_lengths_give_each_microbatch_its_size_and_the_plan_their_order() -> None:
    lengths = [4.0, 1.0, 2.0, 1.0]
    [row] = penstock.plan(table(), 2, batch=8, mb_size=2, lengths=lengths, effort=EFFORT).rows
    assert table().for_lengths(lengths) == row.costs
    assert row.forward_order != (0, 1, 2, 3)
    assert (
        row.time
        < penstock.simulate(
            penstock.schedules.get("ZB-H1")(num_ranks=2, num_microbatches=4), row.costs
        ).makespan
    )
    assert row.sentences[-1].startswith("Microbatches run in the order ")


def test_largest_microbatch_must_fit_beside_the_parameters() -> None:
    layers = [penstock.LayerCost(f"l{n}", 3.0, 1.0, 2.0) for n in range(4)]
    options = {"batch": 4, "mb_size": 1, "lengths": [1, 1, 1, 5], "stages_per_rank": 1}
    # Two layers on a rank: 8 for parameters, and 2.5 times the 4 of a microbatch of mean length.
    with pytest.raises(ScheduleError, match=r"The smallest found that fits is 18: with 4"):
        penstock.plan(layers, 2, **options, memory=17.9, effort=EFFORT)
    row = penstock.plan(layers, 2, **options, memory=18, effort=EFFORT).best
    assert (18.0, 18.0) == row.memory


def test_smallest_memory_for_lengths_is_that_of_the_longest() -> None:
    """It was that of a microbatch of mean length, in which the longest did not fit."""
    costs = CostTable.uniform(2, after_forward=4, after_input=4)
    options = {"batch": 4, "mb_size": 1, "lengths": [1, 1, 1, 5], "stages_per_rank": 1}
    for memory in (1, 4):
        with pytest.raises(ScheduleError, match="10"):
            penstock.plan(costs, 2, memory=memory, effort=EFFORT, **options)
    assert penstock.plan(costs, 2, memory=10, effort=EFFORT, **options).rows

"""What a schedule recomputes, and the order of its microbatches, in words."""

import pytest

import penstock
from penstock import CostTable
from penstock.passes import add_recompute
from penstock.solver.chosen_orders import (
    backward_order,
    count_recomputed,
    describe_order,
    describe_recomputed,
    forward_order,
)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ({}, "Nothing is recomputed."),
        ({1: 3}, "Rank 1 recomputes: 3 of 4 forwards of stage 1."),
        (
            {0: 4, 1: 2},
            "Ranks 0 and 1 recompute: 4 of 4 forwards of stage 0, 2 of 4 of stage 1.",
        ),
        (
            {0: 4, 1: 4, 2: 4, 7: 1},
            "Ranks 0 to 2 recompute: 4 of 4 forwards of each of stages 0 to 2, 1 of 4 of stage 7.",
        ),
        (
            {0: 1, 2: 1, 3: 1},
            "Ranks 0, 2 and 3 recompute: 1 of 4 forwards of stage 0, "
            "1 of 4 of each of stages 2 and 3.",
        ),
    ],
)
def test_recomputed_stages_are_counted_and_named(stages: dict[int, int], expected: str) -> None:
    kept = penstock.schedules.get("ZB-V")(num_ranks=4, num_microbatches=4)
    schedule = add_recompute(kept, lambda stage, mb: mb < stages.get(stage, 0))
    assert expected == describe_recomputed(schedule)
    assert tuple(stages.get(stage, 0) for stage in range(8)) == count_recomputed(schedule)


def test_order_is_that_of_the_first_stage_with_halves_and_overlaps() -> None:
    for name in ("GPipe", "ZB-V", "DualPipeV"):
        schedule = penstock.schedules.get(name)(num_ranks=2, num_microbatches=4)
        assert (0, 1, 2, 3) == forward_order(schedule) == backward_order(schedule)


def test_backwards_in_another_order_are_named() -> None:
    schedule = penstock.Schedule.from_csv("0F1,0F2,0F0,0B0,0I2,0B1,0W2\n")
    assert (
        "Microbatches run in the order 1, 2, 0, and their backwards in the order 0, 2, 1."
        == describe_order(schedule)
    )


def test_stages_with_another_order_are_named() -> None:
    """The order of stage 0 was given as that of all."""
    schedule = penstock.Schedule.from_csv("0F1,0F0,0B1,0B0\n1F1,1F0,1B0,1B1\n")
    assert (
        "Microbatches run in the order 1, 0, and their backwards too. That is on stage 0. "
        "Stage 1 has another order, as the schedule says." == describe_order(schedule)
    )


def test_result_of_a_search_has_both() -> None:
    costs = CostTable.uniform(2, backward_weight=0.5).for_lengths([4096, 1024, 2048])
    found = penstock.search(costs, 2, 3, effort=0.1)
    assert forward_order(found.schedule) == found.forward_order
    assert backward_order(found.schedule) == found.backward_order
    assert 1 == found.forward_order[0]
    assert (0, 0) == found.recomputed

"""Costs that are given along the model, whatever the placement."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import CostTable, schedules
from penstock.costs.given_costs import ShareCosts, TableCosts
from penstock.ir import Placement


def test_one_number_is_shared_out_among_the_stages_of_each_rank() -> None:
    costs = ShareCosts(forward=(3.0,), after_forward=(1.0,)).table(Placement.v(2))
    assert (1.5,) * 4 == costs.forward
    assert (0.5,) * 4 == costs.after_forward


def test_as_many_numbers_as_ranks_are_the_costs_of_stages_in_a_line() -> None:
    costs = ShareCosts(backward_weight=(0.3, 0.1, 0.7)).table(Placement.linear(3))
    assert (0.3, 0.1, 0.7) == costs.backward_weight


def test_as_many_numbers_as_stages_are_parts_of_the_ranks_shares() -> None:
    costs = ShareCosts(backward_input=(1.0, 2.0, 3.0, 4.0)).table(
        Placement.loop(2, stages_per_rank=2)
    )
    assert (0.5, 1.0, 1.5, 2.0) == costs.backward_input


def test_a_stage_across_two_numbers_has_its_part_of_both() -> None:
    costs = ShareCosts(after_input=(1.0, 3.0)).table(Placement.linear(3))
    assert (1.0, 2.0, 3.0) == costs.after_input


def test_ranks_with_different_numbers_of_stages_have_equal_shares() -> None:
    placement = Placement([0, 1, 1, 0, 1])
    costs = ShareCosts(forward=(6.0,)).table(placement)
    assert (3.0, 2.0, 2.0, 3.0, 2.0) == costs.forward


def test_table_of_other_stages_has_the_mean_time_of_messages_between_ranks() -> None:
    costs = CostTable.uniform(4, forward=3.0)
    costs = replace(costs, delay=(1, 5, 2), message_bytes=(2, 0, 4), bandwidth=(4, 1, 4))
    each_its_own = TableCosts(costs).table(Placement.linear(2))
    assert (pytest.approx((1.5 + 5 + 3) / 3),) == each_its_own.delay
    assert (6.0, 6.0) == each_its_own.forward
    # The second edge is within rank 1, where a message takes no time.
    recorded = schedules.get("ZB-V")(num_ranks=2, num_microbatches=2)
    in_a_v = TableCosts(costs, schedule=recorded).table(Placement.linear(2))
    assert ((1.5 + 3) / 2,) == in_a_v.delay


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_what_the_whole_model_costs_does_not_depend_on_how_it_is_cut(
    values: list[float], num_ranks: int, stages_per_rank: int
) -> None:
    placement = Placement.loop(num_ranks, stages_per_rank=stages_per_rank)
    costs = ShareCosts(forward=tuple(values)).table(placement)
    expected = sum(values) / len(values) * num_ranks
    # Each stage is rounded by itself.
    assert expected == pytest.approx(sum(costs.forward), rel=1e-12, abs=1e-300)


def test_costs_of_sharded_parameters_are_shared_out_like_those_of_computes() -> None:
    costs = ShareCosts(gather=(2.0,), reduce=(1.0, 3.0), gathered=(8.0,)).table(Placement.v(2))
    assert (1.0,) * 4 == costs.gather
    assert (0.5, 0.5, 1.5, 1.5) == costs.reduce
    assert (4.0,) * 4 == costs.gathered
    other = TableCosts(costs).table(Placement.linear(2))
    assert (2.0, 2.0) == other.gather
    assert (1.0, 3.0) == other.reduce
    assert (8.0, 8.0) == other.gathered

"""Costs that are given along the model, whatever the placement."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.costs.given_costs import ShareCosts
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

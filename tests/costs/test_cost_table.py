"""Cost tables: what can be left out, and what is rejected."""

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from penstock import CostTable, Placement
from penstock.costs import EdgeCost, StageCost
from penstock.costs.cost_table import DURING, HELD
from penstock.costs.given_costs import ShareCosts, TableCosts
from penstock.errors import CostError

STAGE_FIELDS = [
    "forward",
    "backward_input",
    "backward_weight",
    "backward",
    "after_forward",
    "after_input",
    *DURING,
]
EDGE_FIELDS = ["delay", "message_bytes", "bandwidth"]


def table(**changes: Any) -> CostTable:
    """Three stages with different costs."""
    values = {"forward": [1, 2, 3], "backward_input": [4, 5, 6], "backward_weight": [7, 8, 9]}
    return CostTable(**{**values, **changes})


def test_full_backward_costs_as_much_as_its_halves_if_it_is_not_given() -> None:
    assert (11, 13, 15) == table().backward
    assert (10, 11, 12) == table(backward=[10, 11, 12]).backward


def test_memory_is_one_and_messages_take_no_time_if_nothing_is_given() -> None:
    costs = table()
    assert (1.0,) * 3 == costs.after_forward == costs.after_input
    assert {(0.0,) * 3} == {getattr(costs, name) for name in DURING}
    assert (0.0,) * 2 == costs.delay == costs.message_bytes == costs.transfer
    assert (math.inf,) * 2 == costs.bandwidth
    assert 0.0 == costs.overlap_saving
    assert 3 == costs.num_stages


@pytest.mark.parametrize("name", [*HELD, *EDGE_FIELDS])
def test_one_number_stands_for_every_stage_or_edge(name: str) -> None:
    count = 2 if name in EDGE_FIELDS else 3
    assert (0.5,) * count == getattr(table(**{name: 0.5}), name)


def test_values_are_kept_in_order_whatever_holds_them() -> None:
    for name in (*STAGE_FIELDS, *EDGE_FIELDS):
        expected = (2.0, 3.0) if name in EDGE_FIELDS else (2.0, 3.0, 4.0)
        for values in (expected, list(expected), iter(expected)):
            assert expected == getattr(table(**{name: values}), name), name


def test_transfer_is_the_bytes_by_the_bandwidth_of_each_edge() -> None:
    costs = table(message_bytes=[8, 6], bandwidth=[4, 0.5])
    assert (2.0, 12.0) == costs.transfer


def test_single_stage_has_no_edges() -> None:
    costs = CostTable(forward=[1], backward_input=[1], backward_weight=[1], delay=7)
    assert () == costs.delay == costs.transfer
    assert costs == CostTable.uniform(1, delay=7)


def test_uniform_costs_are_those_of_a_whole_rank_divided_by_its_stages() -> None:
    costs = CostTable.uniform(
        4,
        stages_per_rank=4,
        forward=8,
        backward_input=12,
        backward_weight=16,
        backward=20,
        after_forward=24,
        after_input=4,
        **{name: 8 for name in DURING},
        delay=3,
        message_bytes=5,
        bandwidth=10,
        overlap_saving=0.5,
    )
    expected = CostTable(
        forward=[2] * 4,
        backward_input=[3] * 4,
        backward_weight=[4] * 4,
        backward=[5] * 4,
        after_forward=6,
        after_input=1,
        **{name: 2 for name in DURING},
        # A message is as long as it was: it carries what one stage hands to the next.
        delay=[3] * 3,
        message_bytes=[5] * 3,
        bandwidth=[10] * 3,
        overlap_saving=0.5,
    )
    assert expected == costs


def test_uniform_costs_are_one_each_if_nothing_is_given() -> None:
    ones = [1.0] * 3
    expected = CostTable(forward=ones, backward_input=ones, backward_weight=ones)
    assert expected == CostTable.uniform(3)
    assert (2.0,) * 3 == CostTable.uniform(3).backward


def test_costs_can_be_compared_and_cannot_be_changed() -> None:
    assert table() == table()
    assert hash(table()) == hash(table())
    assert table() != table(delay=1)
    with pytest.raises(AttributeError):
        table().forward = (1.0,)  # type: ignore[misc]


@pytest.mark.parametrize("name", [*STAGE_FIELDS[1:], *EDGE_FIELDS])  # forward is what counts.
def test_wrong_number_of_values_is_rejected(name: str) -> None:
    expected = 2 if name in EDGE_FIELDS else 3
    kind = "edge" if name in EDGE_FIELDS else "stage"
    for count in (1, 4):
        message = (
            f"{name} has {count} values, but forward has 3. Expected {expected}: one per {kind}."
        )
        with pytest.raises(CostError, match=f"^{re.escape(message)}$"):
            table(**{name: [1.0] * count})


def test_wrong_number_of_forwards_is_rejected_by_what_they_are_compared_with() -> None:
    with pytest.raises(CostError, match=r"^backward_input has 3 values, but forward has 2\."):
        table(forward=[1, 2])


def test_no_stage_is_rejected() -> None:
    expected = r"^forward is empty\. Give the time of at least one stage\.$"
    with pytest.raises(CostError, match=expected):
        CostTable(forward=[], backward_input=[], backward_weight=[])
    with pytest.raises(CostError, match=expected):
        CostTable.uniform(0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, -1e-300) for name in (*STAGE_FIELDS, "delay", "message_bytes")),
        ("forward", math.inf),
        ("forward", math.nan),
    ],
)
def test_value_that_is_negative_or_not_finite_is_rejected(name: str, value: float) -> None:
    values: Iterable[float] = [1.0, value] if name in EDGE_FIELDS else [1.0, value, 1.0]
    message = f"{name}[1] is {value}. Expected a finite number that is not negative."
    with pytest.raises(CostError, match=f"^{re.escape(message)}$"):
        table(**{name: values})


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_bandwidth_that_is_not_positive_is_rejected(value: float) -> None:
    message = f"bandwidth[0] is {value}. Expected a positive number, or math.inf."
    with pytest.raises(CostError, match=f"^{re.escape(message)}$"):
        table(bandwidth=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_overlap_saving_beyond_a_share_is_rejected(value: float) -> None:
    message = f"overlap_saving is {value}. Expected a share between 0 and 1."
    with pytest.raises(CostError, match=f"^{re.escape(message)}$"):
        table(overlap_saving=value)


def test_zero_costs_and_saving_all_are_allowed() -> None:
    for name in (*STAGE_FIELDS, "delay", "message_bytes"):
        values = [0.0] * (2 if name in EDGE_FIELDS else 3)
        assert tuple(values) == getattr(table(**{name: values}), name), name
    assert 1.0 == table(overlap_saving=1.0).overlap_saving


def test_uniform_costs_need_a_stage_per_rank() -> None:
    with pytest.raises(CostError, match=r"^stages_per_rank is 0\. Expected at least 1\.$"):
        CostTable.uniform(2, stages_per_rank=0)


def test_numpy_number_stands_for_all_stages() -> None:
    assert (2.0, 2.0) == CostTable.uniform(2, after_forward=np.float32(2)).after_forward


@pytest.mark.parametrize("kind", [np.float32, np.uint8, Fraction])
def test_numbers_of_other_kinds_become_python_s_own(kind: type) -> None:
    """Sums of float32 are rounded more, those of uint8 wrap."""
    costs = CostTable(
        forward=[kind(200)] * 2, backward_input=[kind(200)] * 2, backward_weight=[kind(100)] * 2
    )
    assert (300, 300) == costs.backward
    assert {int, float} >= {type(value) for value in (*costs.forward, *costs.backward)}
    assert costs == CostTable.from_json(costs.to_json())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap_saving": "x"}, "overlap_saving is 'x'. Expected a number."),
        ({"backward_input": ["a", 1]}, "backward_input[0] is 'a'. Expected a number."),
        ({"forward": [10**400, 1]}, "forward[0] is too large for a float."),
        ({"delay": None}, "delay is None. Expected a number."),
    ],
)
def test_value_that_is_no_number_is_named(options: dict[str, Any], message: str) -> None:
    table: dict[str, Any] = {"forward": [1, 1], "backward_input": [1, 1], "backward_weight": [1, 1]}
    with pytest.raises(CostError, match=re.escape(message)):
        CostTable(**{**table, **options})


def test_sharded_parameters_cost_nothing_unless_given() -> None:
    plain = CostTable.uniform(2)
    assert ((0.0, 0.0),) * 3 == (plain.gather, plain.reduce, plain.gathered)
    costs = CostTable.uniform(4, stages_per_rank=2, gather=1.0, reduce=2.0, gathered=3.0)
    assert (0.5,) * 4 == costs.gather
    assert (1.0,) * 4 == costs.reduce
    assert (1.5,) * 4 == costs.gathered


def test_recomputation_takes_as_long_as_a_forward_unless_given() -> None:
    plain = CostTable.uniform(2, forward=3.0)
    assert (3.0, 3.0) == plain.recompute
    assert ((0.0, 0.0),) * 3 == (
        plain.after_dropping,
        plain.during_dropping,
        plain.during_recompute,
    )
    costs = CostTable.uniform(4, stages_per_rank=2, recompute=5.0, after_dropping=1.0)
    assert ((2.5,) * 4, (0.5,) * 4) == (costs.recompute, costs.after_dropping)
    stage = StageCost(1, 2, 3, 4, 5, 6, after_dropping=2)
    table = CostTable.of([stage, stage._replace(recompute=9)], [EdgeCost(0, 0)])
    assert ((1, 9), (2, 2)) == (table.recompute, table.after_dropping)


def test_more_memory_before_a_recomputation_than_after_it_is_rejected() -> None:
    message = (
        "after_dropping[1] is 3.0, but after_forward[1] is 2.0. "
        "Expected at most that: what is recomputed is not held before."
    )
    with pytest.raises(CostError, match=re.escape(message)):
        CostTable(
            forward=[1, 1],
            backward_input=[1, 1],
            backward_weight=[1, 1],
            after_forward=[3.0, 2.0],
            after_dropping=3.0,
        )


def test_table_of_stages_has_what_they_have() -> None:
    stage = StageCost(1, 2, 3, 4, 5, 6, gather=7, reduce=8, gathered=9)
    costs = CostTable.of([stage, stage._replace(gather=1)], [EdgeCost(0, 0)])
    assert ((7, 1), (8, 8), (9, 9)) == (costs.gather, costs.reduce, costs.gathered)
    unsharded = CostTable.of([StageCost(1, 2, 3, 4, 5, 6)], [])
    assert ((0.0,),) * 3 == (unsharded.gather, unsharded.reduce, unsharded.gathered)


def test_recomputation_needs_what_the_forward_needs_unless_it_is_given() -> None:
    costs = CostTable.uniform(2, during_forward=10)
    assert ((10.0, 10.0),) * 2 == (costs.during_dropping, costs.during_recompute)
    assert "during_recompute" not in costs.to_json()
    less = CostTable.uniform(2, during_forward=10, during_dropping=0, during_recompute=4)
    assert ((0.0, 0.0), (4.0, 4.0)) == (less.during_dropping, less.during_recompute)
    assert less == CostTable.from_json(less.to_json())
    stage = StageCost(1, 2, 3, 4, 5, 6, during_forward=7)
    table = CostTable.of([stage, stage._replace(during_dropping=1)], [EdgeCost(0, 0)])
    assert ((7, 1), (7, 7)) == (table.during_dropping, table.during_recompute)
    assert costs == TableCosts(costs).shares(2).table(Placement.linear(2))
    assert (3.0,) == ShareCosts(during_forward=(3.0,)).table(Placement.linear(1)).during_dropping

"""Costs of stages with different memory levels."""

from dataclasses import fields, replace
from fractions import Fraction
from math import inf, nan
from typing import Any

import pytest

from penstock import CostTable
from penstock.costs import StageCost
from penstock.costs.memory_levels import check_levels, check_tables, describe_levels, mix_levels
from penstock.errors import CostError

KEPT = CostTable(
    forward=[1, 2, 3],
    backward_input=[4, 5, 6],
    backward_weight=[7, 8, 9],
    after_forward=[30, 31, 32],
    after_input=[20, 21, 22],
    delay=[1, 5],
    message_bytes=[8, 16],
    bandwidth=[4, inf],
    gather=[1, 2, 3],
    reduce=[4, 5, 6],
    gathered=[7, 8, 9],
    overlap_saving=0.5,
)
LIGHT = CostTable(
    forward=[1, 2, 3],
    backward_input=[14, 15, 16],
    backward_weight=[7, 8, 9],
    after_forward=[10, 11, 12],
    after_input=[25, 26, 27],
    delay=[2, 3],
    message_bytes=[8, 16],
    bandwidth=[2, inf],
    overlap_saving=0.25,
)
TABLES = {1.0: KEPT, "light": LIGHT}


def test_each_stage_has_the_costs_of_its_level() -> None:
    mixed = mix_levels(TABLES, ["light", 1.0, "light"])
    for name in StageCost._fields:
        kept, light = getattr(KEPT, name), getattr(LIGHT, name)
        assert (light[0], kept[1], light[2]) == getattr(mixed, name)


def test_edge_between_two_levels_has_the_slower_messages_of_both() -> None:
    mixed = mix_levels(TABLES, ["light", 1.0, 1.0])
    assert (2, 5) == mixed.delay
    assert (2, inf) == mixed.bandwidth
    assert (8, 16) == mixed.message_bytes
    assert 0.25 == mixed.overlap_saving


@pytest.mark.parametrize("level", TABLES)
def test_costs_of_one_level_are_those_of_its_table(level: Any) -> None:
    mixed = mix_levels(TABLES, [level] * 3)
    for field in fields(CostTable):
        assert getattr(TABLES[level], field.name) == getattr(mixed, field.name)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([], "levels is empty. Give at least one level, such as a memory budget."),
        ("half", "levels is 'half'. Expected several levels: give a list."),
        (0.5, "levels is 0.5. Expected several levels: give a list."),
        ([0.5, None], "levels holds None. Expected numbers or texts."),
        ([nan], "levels holds nan. Expected numbers or texts."),
        ([Fraction(1, 2)], r"levels holds Fraction\(1, 2\). Expected numbers or texts."),
        ([1, 0.5, 1.0], "levels holds 1.0 twice. Give each level once."),
    ],
)
def test_levels_that_cannot_be_told_apart_are_refused(levels: Any, message: str) -> None:
    with pytest.raises(CostError, match=message):
        check_levels("levels", levels)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (3.0, "The costs of level 'light' are 3.0. Expected a CostTable."),
        (
            CostTable.uniform(2),
            "The costs of level 'light' are for 2 stages, those of level 1.0 for 3. Expected the",
        ),
        (
            replace(LIGHT, message_bytes=(8, 8)),
            r"message_bytes of level 'light' are \(8, 8\), those of level 1.0 \(8, 16\). Expected",
        ),
    ],
)
def test_tables_that_are_not_of_the_same_stages_are_refused(table: Any, message: str) -> None:
    with pytest.raises(CostError, match=message):
        check_tables({1.0: KEPT, "light": table})


def test_levels_are_described_by_stage() -> None:
    assert "0: light, 1-3: 1, 4: light" == describe_levels(["light", 1.0, 1.0, 1.0, "light"])


def test_level_that_drops_nothing_needs_as_much_as_its_forward() -> None:
    """Otherwise a dropped forward seemed to need less, though it runs in the same way."""
    whole = CostTable.uniform(2, after_forward=2.0, during_forward=10.0, during_dropping=0.0)
    part = CostTable.uniform(2, after_forward=4.0, after_dropping=1.0, during_recompute=3.0)
    mixed = mix_levels({"whole": whole, "part": part}, ["whole", "part"])
    assert (2.0, 1.0) == mixed.after_dropping
    assert ((10.0, 0.0), (10.0, 3.0)) == (mixed.during_dropping, mixed.during_recompute)

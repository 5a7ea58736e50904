"""Microbatches that differ: their scales in a cost table, given or from lengths."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock import CostTable, Placement, schedules, simulate
from penstock.costs import Work
from penstock.costs.given_costs import ShareCosts, TableCosts
from penstock.costs.memory_levels import check_tables, mix_levels
from penstock.errors import CostError
from penstock.planning import plan

ROW = (1.0, 2.0, 0.5)


def table(**changes: Any) -> CostTable:
    return CostTable.uniform(2, **changes)


def test_microbatches_are_alike_unless_scales_are_given() -> None:
    assert () == table().time_scale == table().memory_scale == table(time_scale=[]).time_scale
    assert table().num_microbatches is None


def test_row_is_for_all_stages_and_rows_are_for_each() -> None:
    assert (ROW, ROW) == table(time_scale=ROW).time_scale
    assert ((1, 2), (3, 4)) == table(time_scale=[[1, 2], iter([3, 4])]).time_scale
    assert ROW == table(memory_scale=list(ROW)).memory_scale
    assert 3 == table(time_scale=ROW).num_microbatches == table(memory_scale=ROW).num_microbatches


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_scale": 2}, "time_scale is 2. Expected one number per microbatch: give a list."),
        ({"memory_scale": "12"}, "memory_scale is '12'. Expected one number per microbatch"),
        ({"time_scale": [1, 0]}, "time_scale[1] is 0. Expected a positive, finite number."),
        ({"time_scale": [[1], [-1]]}, "time_scale[1][0] is -1. Expected a positive, finite"),
        ({"memory_scale": [float("nan")]}, "memory_scale[0] is nan. Expected a positive, finite"),
        ({"memory_scale": [float("inf")]}, "memory_scale[0] is inf. Expected a positive, finite"),
        ({"memory_scale": ["1"]}, "memory_scale[0] is '1'. Expected a number."),
        ({"time_scale": [1, [2]]}, "time_scale[1] is [2]. Expected a number."),
        (
            {"time_scale": [[1, 2]] * 3},
            "time_scale has 3 rows, but there are 2 stages. Expected one number per microbatch, "
            "or one row of them per stage.",
        ),
        (
            {"time_scale": [[1, 2], [1]]},
            "time_scale[1] has 1 numbers, and time_scale[0] has 2. Expected one number per "
            "microbatch in each row.",
        ),
        (
            {"time_scale": [[], []]},
            "time_scale[0] is empty. Expected one number per microbatch in each row.",
        ),
        (
            {"time_scale": ROW, "memory_scale": [1, 2]},
            "time_scale is for 3 microbatches, and memory_scale for 2. Expected one number per "
            "microbatch in each.",
        ),
    ],
)
def test_scales_that_cannot_be_meant_are_rejected(changes: Any, message: str) -> None:
    with pytest.raises(CostError, match=re.escape(message)):
        table(**changes)


def test_scales_come_back_from_text_and_are_left_out_if_there_are_none() -> None:
    costs = table(time_scale=[[1, 0.1 + 0.2], [3, 1 / 3]], memory_scale=[1, 0.7])
    assert costs == CostTable.from_json(costs.to_json())
    assert costs.to_json() == CostTable.from_json(costs.to_json()).to_json()
    assert {"time_scale", "memory_scale"}.isdisjoint(json.loads(table().to_json()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_scale": 1}, "time_scale is 1. Expected a list of numbers."),
        ({"time_scale": [[1], ["x"]]}, "time_scale[1][0] is 'x'. Expected a number"),
        ({"memory_scale": [[1]]}, "memory_scale[0] is [1]. Expected a number"),
    ],
)
def test_scales_are_read_with_care(changes: Any, message: str) -> None:
    text = json.dumps({**json.loads(table().to_json()), **changes})
    with pytest.raises(CostError, match=re.escape(message)):
        CostTable.from_json(text)


def test_costs_with_scales_are_for_as_many_microbatches() -> None:
    schedule = schedules.get("1F1B")(num_ranks=2, num_microbatches=4)
    message = "The costs are for 3 microbatches of different sizes, but there are 4. Give a length"
    for scales in ({"time_scale": ROW}, {"memory_scale": ROW}):
        with pytest.raises(CostError, match=message):
            simulate(schedule, table(**scales))
        with pytest.raises(CostError, match=message):
            schedule.verify(costs=table(**scales))


def test_plan_refuses_scales_since_it_chooses_the_number_of_microbatches() -> None:
    with pytest.raises(CostError, match=r"scales for 3 microbatches\. A plan chooses"):
        plan(table(time_scale=ROW), 2, batch=6, mb_size=1)


def test_levels_are_of_the_same_microbatches() -> None:
    tables = {1: table(time_scale=ROW), 2: table(time_scale=ROW, forward=2)}
    assert (ROW, ROW) == mix_levels(tables, [1, 2]).time_scale
    memory = {1: table(memory_scale=ROW), 2: table(memory_scale=ROW)}
    assert ROW == mix_levels(memory, [2, 1]).memory_scale
    message = "time_scale of level 2 is (), that of level 1 ((1.0, 2.0, 0.5), (1.0, 2.0, 0.5))."
    with pytest.raises(CostError, match=re.escape(message)):
        check_tables({1: table(time_scale=ROW), 2: table()})


def test_other_stages_have_the_mean_scale_of_what_they_cover() -> None:
    given = TableCosts(table(time_scale=[[1, 2], [3, 2]], memory_scale=[4, 5]))
    assert ((1, 2), (1, 2), (3, 2), (3, 2)) == given.table(Placement.v(2)).time_scale
    assert ((2, 2),) == given.table(Placement.linear(1)).time_scale
    assert (4, 5) == given.table(Placement.linear(1)).memory_scale
    assert 2 == given.num_microbatches == given.shares(2).num_microbatches
    assert ShareCosts().num_microbatches is None


def test_lengths_give_scales_against_the_length_that_was_measured() -> None:
    costs = table(time_scale=[9]).for_lengths([512, 2048], measured_length=1024)
    assert ((0.5, 2.0),) * 2 == costs.time_scale
    assert (0.5, 2.0) == costs.memory_scale
    squares = table().for_lengths([512, 2048], measured_length=1024, work=Work(0, 3))
    assert ((0.25, 4.0),) * 2 == squares.time_scale
    assert (0.5, 2.0) == squares.memory_scale
    mixed = table().for_lengths([2, 4], measured_length=2, work=Work(1, 0.5))
    assert ((1.0, 3.0),) * 2 == mixed.time_scale


def test_mean_length_is_the_measured_one_if_none_is_given() -> None:
    assert (0.5, 1.5) == table().for_lengths([100, 300]).memory_scale
    assert (0.5, 1.5) == table().for_lengths(torch.tensor([100, 300])).memory_scale
    assert (0.5, 1.5) == table(memory_scale=torch.tensor([0.5, 1.5])).memory_scale
    given = ShareCosts().for_lengths([100, 300], Work())
    assert ((0.5, 1.5),) * 2 == given.table(Placement.linear(2)).time_scale
    same = TableCosts(table()).for_lengths([100, 300], Work())
    assert given.table(Placement.linear(2)) == same.table(Placement.linear(2))


def test_packed_documents_do_not_attend_to_each_other() -> None:
    costs = table().for_lengths([[2, 2], 4], measured_length=4, work=Work(0, 1))
    assert (0.5, 1.0) == costs.time_scale[0]
    assert (1.0, 1.0) == costs.memory_scale


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (5, {}, "lengths is 5. Expected one length per microbatch: give a list."),
        ("512", {}, "lengths is '512'. Expected one length per microbatch: give a list."),
        ([], {}, "lengths is empty. Give the length of at least one microbatch."),
        ([[1], []], {}, "lengths[1] is empty. Expected at least one document."),
        ([1, 0], {}, "lengths[1] is 0. Expected a positive, finite number of tokens."),
        ([1, "2"], {}, "lengths[1] is '2'. Expected a number."),
        ([1, b"2"], {}, "lengths[1] is b'2'. Expected a number."),
        ([1], {"measured_length": -2}, "measured_length is -2. Expected a positive, finite"),
        ([1], {"work": "tokens"}, "work is 'tokens'. Expected a penstock.costs.Work."),
    ],
)
def test_lengths_that_cannot_be_meant_are_rejected(
    lengths: Any, options: Any, message: str
) -> None:
    with pytest.raises(CostError, match=re.escape(message)):
        table().for_lengths(lengths, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Work(-1), "per_token is -1. Expected a number from 0 to 1e+15."),
        (lambda: Work(1, float("inf")), "per_square is inf. Expected a number from 0 to 1e+15."),
        (lambda: Work(0, 0), "per_token and per_square are both 0. Expected one above 0."),
        (lambda: Work.of_transformer(0), "width is 0. Expected a whole number, at least 1."),
    ],
)
def test_work_that_cannot_be_meant_is_rejected(make: Any, message: str) -> None:
    with pytest.raises(CostError, match=re.escape(message)):
        make()


def test_attention_takes_as_much_as_the_matrices_at_six_widths() -> None:
    work = Work.of_transformer(128)
    assert 2 * 6 * 128 == pytest.approx(work(6 * 128))


def test_times_and_memory_grow_with_the_scales() -> None:
    """One rank: B of microbatch 0 runs while both are held."""
    schedule = schedules.get("GPipe")(num_ranks=1, num_microbatches=2)
    costs = CostTable.uniform(1, after_forward=3.0, during_backward=1.0)
    report = simulate(schedule, replace(costs, time_scale=((2.0, 0.5),), memory_scale=(1.0, 3.0)))
    assert [2.0, 0.5, 4.0, 1.0] == [a.end - a.start for a in report.actions()]
    assert 13.0 == max(point.held for point in report.memory(0))
    assert 13.0 == report.peak_memory

"""Cost tables as text: what is written can be read again, and nothing else."""

import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import CostTable
from penstock.errors import CostError


def table(**changes: Any) -> CostTable:
    """Three stages, with numbers that no short decimal fraction is equal to."""
    values = {
        "forward": [0.1 + 0.2, 1 / 3, 2**-40],
        "backward_input": [4, 5, 6],
        "backward_weight": [1e-300, 1e300, 0],
        "backward": [7.5, 8.5, 9.5],
        "after_forward": [2**53 + 1, 1, 2],
        "during_weight": [3, 0, 2**53 + 1],
        "delay": [1e-5, 2e-5],
        "bandwidth": [math.inf, 1e9],
        "overlap_saving": 0.25,
    }
    return CostTable(**{**values, **changes})


def changed(**changes: Any) -> str:
    """The text of a table with some fields replaced; a field of `...` is left out."""
    values = {**json.loads(table().to_json()), **changes}
    return json.dumps({name: value for name, value in values.items() if value is not ...})


def test_table_comes_back_exactly() -> None:
    costs = table()
    again = CostTable.from_json(costs.to_json())
    assert costs == again
    assert costs.to_json() == again.to_json()


@pytest.mark.parametrize("number", [np.float64(0.5), np.int32(2), Fraction(1, 4)])
def test_any_kind_of_number_is_written(number: Any) -> None:
    costs = table(forward=[number] * 3)
    assert costs == CostTable.from_json(costs.to_json())


def test_table_of_one_stage_comes_back() -> None:
    costs = CostTable.uniform(1)
    assert costs == CostTable.from_json(costs.to_json())


def test_infinite_bandwidth_is_valid_json() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    values = json.loads(table().to_json(), parse_constant=refuse)
    assert ["inf", 1e9] == values["bandwidth"]
    assert ("penstock costs", 1) == (values["format"], values["version"])


def test_table_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    table().save(path)
    assert table() == CostTable.load(path)


def test_file_that_holds_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("{}")
    with pytest.raises(CostError, match=r"costs\.json cannot be read: The text"):
        CostTable.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "The text is not JSON: Expecting property name"),
        ("[1, 2]", "The text is of the format None. Expected 'penstock costs'"),
        ('{"format": "torch"}', "The text is of the format 'torch'. Expected 'penstock costs'"),
        (changed(version=2), "The text is of version 2. This Penstock reads version 1"),
        (changed(forward=..., delay=...), "The text has no delay, forward. Expected exactly the"),
        (changed(colour=1), "The text has colour. Expected exactly the fields of a CostTable"),
        (changed(forward=3), "forward is 3. Expected a list of numbers."),
        (changed(forward=[1, "2", 3]), "forward[1] is '2'. Expected a number, or \"inf\"."),
        (changed(forward=[1, True, 3]), "forward[1] is True. Expected a number"),
        (changed(overlap_saving="half"), "overlap_saving is 'half'. Expected a number."),
        (changed(forward=[1, "inf", 3]), "forward[1] is inf. Expected a finite number"),
        (changed(forward=[1, 2]), "backward_input has 3 values, but forward has 2"),
    ],
)
def test_text_that_is_no_cost_table_is_rejected(text: str, message: str) -> None:
    with pytest.raises(CostError, match=re.escape(message)):
        CostTable.from_json(text)


def test_path_in_place_of_a_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"The text is a .*Path. Give the contents of the file"):
        CostTable.from_json(tmp_path)  # type: ignore[arg-type]


def test_costs_of_sharded_parameters_come_back_and_are_left_out_if_there_are_none() -> None:
    """Files from before there were such costs are read, and theirs are as they were."""
    costs = table(gather=[0.5, 0, 1], reduce=2, gathered=[7, 8, 9])
    assert costs == CostTable.from_json(costs.to_json())
    assert [7, 8, 9] == json.loads(costs.to_json())["gathered"]
    assert {"gather", "reduce", "gathered"}.isdisjoint(json.loads(table().to_json()))
    assert (0.0, 0.0, 0.0) == CostTable.from_json(table().to_json()).gather
    assert (7, 8, 9) == CostTable.from_json(changed(gathered=[7, 8, 9])).gathered


@pytest.mark.parametrize("name", ["gather", "reduce", "gathered"])
def test_costs_of_sharded_parameters_are_read_with_care(name: str) -> None:
    with pytest.raises(CostError, match=f"{name} has 2 values, but forward has 3. Expected 3: one"):
        CostTable.from_json(changed(**{name: [1, 2]}))
    with pytest.raises(CostError, match=f"{name} is 1. Expected a list of numbers"):
        CostTable.from_json(changed(**{name: 1}))
    with pytest.raises(CostError, match=f"{name}.0. is -1. Expected a finite number"):
        table(**{name: [-1, 0, 0]})

"""Models of transformers that cannot be traced, or could not before, train as the whole model.

`scripts/hugging_face` does the same with all model types, and makes the table in docs/cutting.md.
"""

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "hugging_face"))

import try_type  # after the path
from found_table import BEGIN, END, PAGE, is_trained, load, make_table

from fuzzing import IS_LONG
from penstock.cutting import CutModel, cut_between_layers

# How each is cut: bloom has an autograd Function, opt and bart may drop layers, and the costs of
# jetmoe depend on values.
WAYS = {
    "causal/bloom": "untraced",
    "causal/opt": "traced",
    "seq2seq/bart": "traced",
    "causal/jetmoe": "traced",
}


@pytest.fixture(autouse=True)
def _default_dtype() -> Any:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.fuzz
@pytest.mark.parametrize("label", WAYS if IS_LONG else list(WAYS)[:3])  # The last takes long.
def test_gradients_of_two_stages_are_those_of_the_whole_model(label: str) -> None:
    pytest.importorskip("transformers")
    category, _, kind = label.partition("/")
    found = try_type.try_type(category, kind, "", "ZB-H1")
    assert ("equal", WAYS[label]) == (found["result"], found["way"]), found


@pytest.mark.parametrize("label", ["seq2seq/bart", "causal/opt", "seq2seq/t5"])
def test_gradients_are_equal_without_tracing(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position bias of t5 is a value that all layers take."""
    pytest.importorskip("transformers")

    def cut_untraced(model: Any, num_stages: int, args: Any, kwargs: Any) -> CutModel:
        logging.getLogger("penstock").info("not by tracing it: not tried")
        return cut_between_layers(copy.deepcopy(model), num_stages, args, kwargs)

    monkeypatch.setattr(try_type, "cut_any", cut_untraced)
    category, _, kind = label.partition("/")
    found = try_type.try_type(category, kind, "", "ZB-H1")
    assert ("equal", "untraced") == (found["result"], found["way"]), found


def test_page_has_the_table_of_what_was_found() -> None:
    _, _, rest = PAGE.read_text().partition(BEGIN)
    assert make_table(load()) == rest.partition(END)[0].removeprefix("\n")


def test_nearly_all_types_that_train_are_cut() -> None:
    trained = [value for value in load().values() if is_trained(value)]
    equal = [value for value in trained if value["result"] == "equal"]
    assert len(equal) >= 0.98 * len(trained)

"""What a plan is refused for."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import CostTable, LayerCost
from penstock.costs import Work
from penstock.errors import CostError

LAYERS = [LayerCost("a", 1.0, 1.0, 1.0), LayerCost("b", 1.0, 1.0, 1.0)]
BATCH = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0. Expected a whole number, at least 1."),
        ({"num_ranks": True}, "num_ranks is True. Expected a whole number"),
        ({"keep": 0}, "keep is 0. Expected a whole number, at least 1."),
        ({"batch": 2.5}, "batch is 2.5. Expected a whole number, at least 1."),
        ({"mb_size": None}, "mb_size is missing. Give the number of samples"),
        ({"microbatches": []}, "microbatches is empty. Give at least one whole number."),
        ({"memory": 0}, "memory is 0. Expected a finite number above 0."),
        ({"seconds": -1}, "seconds is -1. Expected a finite number above 0."),
        ({"delay": -1}, "delay is -1. Expected a finite number that is not negative."),
        ({"overhead": float("nan")}, "overhead is nan. Expected a finite number"),
        ({"bytes_per_parameter_byte": "4"}, "bytes_per_parameter_byte is '4'. Expected a finite"),
        ({"layers": ["a"]}, r"layers is \['a'\]. It is for a model, but costs were given. Leave"),
        ({"measure": True}, "measure is True. It is for a model"),
        ({"speed": 1.0}, "speed is 1.0. It is for a model"),
        ({"kwargs": {}}, "kwargs is {}. It is for a model"),
        ({"loss_fn": max}, "loss_fn is <built-in function max>. It is for a model"),
        ({"target": 1}, "target is 1. It is for a model"),
        ({"what": 3}, "what is 3. Expected a model, a sequence of LayerCost, a CostTable, or one"),
        (
            {"what": {}},
            "the mapping of levels is empty. Give at least one level, such as a memory budget.",
        ),
        ({"work": Work()}, r"work is Work\(.*\), but there are no lengths. Give lengths too."),
        ({"work": 0, "lengths": [1, 1]}, r"work is 0. Expected a penstock.costs.Work"),
        ({"overhead": 0.5, "lengths": [1, 1]}, "overhead is 0.5, but lengths are given, which"),
        ({"lengths": 4}, "lengths is 4. Expected one length per microbatch: give a list."),
        (
            {"lengths": [1, 2], "microbatches": 4},
            r"microbatches is \[4\], but 2 lengths are given. Expected one length per microbatch",
        ),
        ({"what": []}, r"The costs of layers are \[\]. Expected at least one LayerCost"),
        ({"what": [1.0]}, r"The costs of layers are \[1.0\]. Expected at least one LayerCost"),
    ],
)
def test_wrong_question_about_costs_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"what": LAYERS, "num_ranks": 2, "batch": 4, "mb_size": 1, **options}
    with pytest.raises(CostError, match=message):
        penstock.plan(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mb_size": 2}, "mb_size is 2. A model is given the whole batch"),
        ({"batch": 4}, "batch is 4. Expected the model's arguments for a whole batch: a tuple"),
        ({"batch": ()}, "batch has no tensor that can be cut into microbatches."),
        ({"batch": (torch.tensor(1.0),)}, "batch has no tensor that can be cut"),
        ({"speed": 0}, "speed is 0. Expected a finite number above 0."),
        ({"target": BATCH}, "target was given without loss_fn"),
        ({"speed": 2, "measure": True}, "speed is 2. It is for counted costs, but measure is True"),
        (
            {"batch": BATCH.to("meta"), "measure": True},
            "measure is True, but the model or the batch is on the meta device",
        ),
    ],
)
def test_wrong_question_about_a_model_is_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(CostError, match=message):
        penstock.plan(**{"what": model, "num_ranks": 2, "batch": BATCH, **options})


def test_table_needs_the_size_of_its_microbatches() -> None:
    with pytest.raises(CostError, match="mb_size is missing"):
        penstock.plan(CostTable.uniform(2), 2, batch=4)

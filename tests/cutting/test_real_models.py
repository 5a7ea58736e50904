"""Models of transformers and torch train in a traced pipeline as they do whole.

`make fuzz` has all of them; elsewhere two or three do, since each takes seconds to trace.
"""

from functools import cache

import pytest
from torch import nn

import penstock
from fuzzing import IS_LONG, rotated
from real_models import (
    REAL_MODELS,
    assert_like_whole,
    cut_real,
    holds_all_of,
    train_stages,
    train_whole,
)
from staged_models import StepRecord

SOME_MODELS = list(REAL_MODELS) if IS_LONG else ["gpt2", "torch_transformer"]


@cache
def whole(name: str) -> nn.Module:
    return REAL_MODELS[name].build()


@cache
def step_of_whole(name: str) -> StepRecord:
    return train_whole(REAL_MODELS[name], whole(name), REAL_MODELS[name].batch())


def check(name: str, cut: str, schedule: str) -> None:
    model = REAL_MODELS[name]
    pipe = cut_real(model, whole(name), cut)
    assert holds_all_of(whole(name), pipe)
    ranks = penstock.local_ranks(2, train_stages, pipe, model, model.batch(), schedule)
    assert_like_whole(step_of_whole(name), ranks)


@rotated(name=SOME_MODELS, cut=["names 2", "balanced 2"])
def test_model_in_two_stages_trains_as_whole(name: str, cut: str) -> None:
    check(name, cut, "1F1B")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", REAL_MODELS if IS_LONG else ["gpt2"])
def test_model_in_four_stages_trains_as_whole_with_split_backward(name: str) -> None:
    check(name, "balanced 4", "ZBV")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["gpt2", "t5"] if IS_LONG else ["t5"])
def test_model_that_returns_tuples_trains_as_whole_with_split_backward(name: str) -> None:
    model = REAL_MODELS[name].in_tuples()
    batch = model.batch()
    pipe = cut_real(model, whole(name), "names 4")
    ranks = penstock.local_ranks(2, train_stages, pipe, model, batch, "ZBV")
    assert_like_whole(train_whole(model, whole(name), batch), ranks)


def test_shared_embedding_of_t5_is_tied_between_the_three_stages_that_use_it() -> None:
    pipe = cut_real(REAL_MODELS["t5"], whole("t5"), "names 4")
    tied = [stage.tied for stage in pipe.info().stages]
    assert [("shared.weight",), ("shared.weight",), (), ("shared.weight",)] == tied

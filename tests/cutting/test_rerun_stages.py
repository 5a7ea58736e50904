"""Stages that run the whole model's forward: their dtypes and hooks."""

import copy
from typing import Any

import pytest
import torch

from layered_models import WIDTH, Layers, own_backwards, some_tokens
from penstock.cutting import cut_between_layers
from penstock.errors import StageError


def test_converted_stages_are_refused() -> None:
    """Masks of later stages would still have the dtype of the example."""
    tokens = some_tokens()
    pieces = cut_between_layers(own_backwards(), 2, (tokens,))
    for module in pieces.modules:
        module.double()
    with pytest.raises(StageError, match=r"is a tensor of torch\.float64, but of torch\.float32"):
        pieces(tokens)


def test_hooks_of_the_model_run_around_it_and_later_ones_around_a_stage() -> None:
    model = Layers()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: ((), {"tokens": 1 - kwargs["tokens"]}), with_kwargs=True
    )
    model.register_forward_hook(lambda _, args, output: 2 * output)
    tokens = some_tokens() % 2
    pieces = cut_between_layers(copy.deepcopy(model), 2, (tokens,))
    seen: list[Any] = []
    for module in pieces.modules:
        module.register_forward_hook(lambda *given: seen.append(given[2]))
    output = pieces(tokens)
    assert torch.equal(model(tokens=tokens), output)
    [[value], last] = seen
    assert (*tokens.shape, WIDTH) == value.shape
    assert last is output

import pytest
import torch

from penstock.errors import OptionError
from penstock.training.gpt import Gpt
from penstock.training.settings import SIZES, GptConfig, TrainConfig


@pytest.mark.parametrize("name", SIZES)
def test_number_of_parameters_is_that_of_the_model(name: str) -> None:
    with torch.device("meta"):
        model = Gpt(SIZES[name])
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert expected == SIZES[name].num_parameters


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0, 8, 2, 4), "--layers is 0. Expected a whole number, at least 1."),
        ((1, -8, 2, 4), "--width is -8."),
        ((1, 8, 0, 4), "--heads is 0."),
        ((1, 8, 2, 0), "--context is 0."),
        ((1, 8, 3, 4), "--width is 8, which cannot be divided evenly among 3 heads."),
    ],
)
def test_model_that_cannot_be_is_rejected(sizes: tuple[int, int, int, int], expected: str) -> None:
    with pytest.raises(OptionError) as error:
        GptConfig(*sizes)
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_ranks": 0}, "--ranks is 0. Expected a whole number, at least 1."),
        ({"num_microbatches": 0}, "--microbatches is 0."),
        ({"batch": -1}, "--batch is -1."),
        ({"steps": 0}, "--steps is 0."),
        ({"every": 0}, "--every is 0."),
        ({"stages_per_rank": 0}, "--stages-per-rank is 0."),
        ({"seed": -1}, "--seed is -1. Expected a whole number from 0"),
        ({"lr": 0.0}, "--lr is 0.0. Expected a number above 0"),
        ({"lr": float("nan")}, "--lr is nan."),
        ({"batch": 10}, "--batch is 10, which cannot be cut into 8 equal microbatches."),
        ({"resume": True}, "--resume is given without --checkpoint."),
    ],
)
def test_run_that_cannot_be_is_rejected(options: dict[str, int], expected: str) -> None:
    with pytest.raises(OptionError) as error:
        TrainConfig(SIZES["tiny"], **options)
    assert str(error.value).startswith(expected)

from dataclasses import replace

import pytest
import torch

from penstock.errors import OptionError
from penstock.training.gpt import Gpt
from penstock.training.gpt_sizes import SIZES, GptConfig
from penstock.training.optimisation import learning_rate, make_optimizer, set_rates
from penstock.training.settings import TrainConfig

TINY = TrainConfig(SIZES["tiny"])


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
        ({"keep": 0}, "--keep is 0."),
        ({"accumulate": 0}, "--accumulate is 0."),
        ({"replicas": 0}, "--replicas is 0."),
        ({"shards": 0}, "--shards is 0."),
        ({"stages_per_rank": 0}, "--stages-per-rank is 0."),
        ({"eval_every": 0}, "--eval-every is 0."),
        ({"eval_batches": -1}, "--eval-batches is -1. Expected a whole number, at least 0."),
        ({"restarts": -1}, "--restarts is -1. Expected a whole number, at least 0."),
        ({"spares": -1}, "--spares is -1. Expected a whole number, at least 0."),
        ({"min_ranks": 0}, "--min-ranks is 0. Expected a whole number, at least 1."),
        ({"restarts": 3}, "--restarts is 3 without --checkpoint, so a restart would lose all"),
        ({"snapshot_every": 0}, "--snapshot-every is 0. Expected a whole number, at least 1."),
        (
            {"snapshot_every": 5, "shards": 2, "restarts": 1, "min_ranks": 1},
            "--snapshot-every is 5, --shards 2 and --min-ranks 1, but snapshots of shards fit",
        ),
        ({"spares": 1}, "--spares is 1 without --restarts, so it would never be used."),
        ({"min_ranks": 1}, "--min-ranks is 1 without --restarts, so it would never be used."),
        (
            {"restarts": 1, "checkpoint": "a", "min_ranks": 3},
            "--min-ranks is 3, but --ranks is 2. Expected at most that number.",
        ),
        (
            {"restarts": 1, "checkpoint": "a", "min_ranks": 1, "schedule": "a.csv"},
            "--min-ranks is 1, but the schedule in a.csv is for 2 ranks.",
        ),
        ({"warmup": -1}, "--warmup is -1. Expected a whole number, at least 0."),
        ({"warmup": 200}, "--warmup is 200, but --steps is 200, so --lr would never be reached."),
        ({"seed": -1}, "--seed is -1. Expected a whole number from 0"),
        ({"lr": 0.0}, "--lr is 0.0. Expected a number above 0"),
        ({"lr": float("nan")}, "--lr is nan."),
        ({"min_lr": -1.0}, "--min-lr is -1.0. Expected a number of at least 0"),
        ({"min_lr": 0.1}, "--min-lr is 0.1, which is more than --lr, 0.001."),
        ({"weight_decay": -1.0}, "--weight-decay is -1.0."),
        ({"clip": 0.0}, "--clip is 0.0. Expected a number above 0"),
        ({"dtype": "half"}, "--dtype is 'half'. Expected float32, bfloat16, float64."),
        ({"autocast": "half"}, "--autocast is 'half'. Expected bfloat16."),
        (
            {"autocast": "bfloat16", "dtype": "bfloat16"},
            "--autocast is bfloat16 and --dtype bfloat16.",
        ),
        ({"batch": 10}, "--batch is 10, which cannot be cut into 8 equal microbatches."),
        ({"replicas": 2, "shards": 2}, "--batch is 16, which cannot be cut into 8 equal microba"),
        ({"resume": True}, "--resume is given without --checkpoint."),
        ({"eval_share": 1.0}, "--eval-share is 1.0. Expected a share"),
        ({"eval_share": 0.1, "eval_data": ("a",)}, "--eval-share and --eval-data are both given."),
        ({"evaluate_only": True}, "there is nothing to evaluate on."),
    ],
)
def test_run_that_cannot_be_is_rejected(options: dict[str, int], expected: str) -> None:
    with pytest.raises(OptionError) as error:
        replace(TINY, **options)
    assert str(error.value).startswith(expected)


def test_learning_rate_rises_and_falls_by_a_cosine() -> None:
    config = replace(TINY, steps=8, warmup=2, lr=1.0, min_lr=0.1)
    rates = [learning_rate(config, step) for step in range(1, 9)]
    assert [0.5, 1.0] == rates[:2]
    assert (0.55, 0.1) == (pytest.approx(rates[4]), pytest.approx(rates[7]))
    assert rates[1:] == sorted(rates[1:], reverse=True)
    # A run that goes on after its last step keeps the last rate.
    assert pytest.approx(0.1) == learning_rate(config, 12)


def test_learning_rate_is_constant_without_a_last_one() -> None:
    config = replace(TINY, lr=0.5)
    assert {0.5} == {learning_rate(config, step) for step in (1, 100, 200)}


def test_weight_decay_is_for_matrices_alone() -> None:
    config = replace(TINY, weight_decay=0.5)
    matrix, vector = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,)))
    optimizer = make_optimizer([vector, matrix], config)
    set_rates(optimizer, config, 1)
    decays = {each: g["weight_decay"] for g in optimizer.param_groups for each in g["params"]}
    assert {matrix: 0.5, vector: 0.0} == decays

"""Schedules that add in order train one cut alike to the last bit, split or not."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from backward.cases_products import Block
from penstock import Pipeline, schedules
from stage_training import Group, make_stages, rank_in
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 4, 6, 2
# Long enough for kernels to add up in blocks, where fused and plain additions round differently.
TOKENS, WIDTH = (3, 100), 48


class Trained(NamedTuple):
    """What a rank has after its steps, by name, and the losses of all microbatches."""

    params: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    losses: list[Tensor]


def stage_module(index: int) -> nn.Module:
    torch.manual_seed(index)
    convolution = nn.Conv1d(TOKENS[1], TOKENS[1], 3, padding=1)
    return nn.Sequential(Block(WIDTH), convolution, nn.Linear(WIDTH, WIDTH))


def train_by(group: Group, name: str, num_ranks: int) -> Trained:
    schedule = schedules.get(name)(num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
    assert schedule.adds_in_order
    held = schedule.placement.stages_of(rank_in(group))
    modules = [stage_module(index) if index in held else None for index in range(NUM_STAGES)]
    stages = make_stages(group, modules, held)
    pipeline = Pipeline(stages, schedule, loss_fn=functional.mse_loss)
    named = {f"{i}.{n}": p for i in held for n, p in modules[i].named_parameters()}
    optimizer = torch.optim.AdamW(named.values(), lr=0.01)
    losses: list[Any] = []
    for step in range(NUM_STEPS):
        torch.manual_seed(100 + step)
        x, target = torch.randn(2, NUM_MICROBATCHES * TOKENS[0], TOKENS[1], WIDTH)
        found: list[Any] = []
        optimizer.zero_grad()
        pipeline.step(x, target=target, losses=found)
        optimizer.step()
        losses += found
    params = {name: param.detach() for name, param in named.items()}
    return Trained(params, {name: param.grad for name, param in named.items()}, losses)


def joined(ranks: list[Trained]) -> dict[str, Tensor]:
    """All that the ranks have, by name."""
    found = {}
    for done in ranks:
        found |= {f"parameter {name}": value for name, value in done.params.items()}
        found |= {f"gradient {name}": value for name, value in done.grads.items()}
        found |= {f"loss {number}": loss for number, loss in enumerate(done.losses)}
    return found


@pytest.fixture(scope="module")
def expected(pool: WorkerPool) -> dict[str, Tensor]:
    return joined(pool.run(4, train_by, "1F1B", 4))


@pytest.mark.parametrize(
    ("name", "num_ranks"), [("ZB-H1", 4), ("ZB-V", 2), ("V-Half", 2), ("DualPipeV", 2)]
)
def test_schedule_trains_like_1f1b_to_the_last_bit(
    name: str, num_ranks: int, expected: dict[str, Tensor], pool: WorkerPool
) -> None:
    actual = joined(pool.run(num_ranks, train_by, name, num_ranks))
    assert expected.keys() == actual.keys()
    assert NUM_STEPS * NUM_MICROBATCHES == sum(key.startswith("loss") for key in expected)
    for key, value in expected.items():
        assert torch.equal(value, actual[key]), key

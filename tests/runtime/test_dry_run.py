"""Steps on torch's fake process group: one process that pretends to be one of several ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from local_steps import WIDTH, mean_square
from penstock import Pipeline, compat
from penstock.errors import StageError

M = 4


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield request.param
    dist.destroy_process_group()


def make_stages(held: list[int], **options: Any) -> list[compat.PipelineStage]:
    return [
        compat.PipelineStage(nn.Linear(WIDTH, WIDTH), index, 4, "cpu", **options) for index in held
    ]


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_schedules_step_on_the_fake_backend(name: str, rank: int) -> None:
    held = [rank, 3 - rank if name == "ScheduleZBVZeroBubble" else rank + 2]
    example = torch.empty(2, WIDTH, device="meta")
    stages = make_stages(held, input_args=example, output_args=example)
    schedule = getattr(compat, name)(stages, M, loss_fn=mean_square)
    losses: list[Any] = []
    for _ in range(2):
        x = torch.ones(2 * M, WIDTH)
        schedule.step(x, target=x, losses=losses)
        schedule.eval(x)
    assert (M if 3 in held else 0) == len(losses)
    for stage in stages:
        assert all(weight.grad is not None for weight in stage.submod.parameters())


def test_stage_without_examples_is_refused(rank: int) -> None:
    pipeline = Pipeline(make_stages([rank, rank + 2]), "Interleaved1F1B", num_microbatches=M)
    message = rf"stage {2 if rank == 0 else 1} has no input_args, and no message arrives in a dry"
    with pytest.raises(StageError, match=message):
        pipeline.step(torch.ones(2 * M, WIDTH))


def test_ties_depend_on_other_ranks(rank: int) -> None:
    example = torch.empty(2, WIDTH)
    stages = make_stages(
        [rank, rank + 2], input_args=example, output_args=example, tied={"weight": "shared"}
    )
    pipeline = Pipeline(stages, "Interleaved1F1B", num_microbatches=M, loss_fn=mean_square)
    with pytest.raises(StageError, match="skips and tied parameters depend on others"):
        pipeline.step(torch.ones(2 * M, WIDTH), target=torch.ones(2 * M, WIDTH))

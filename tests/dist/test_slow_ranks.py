"""A rank that becomes slow while training: it is named, and planned around."""

import logging
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from fuzzing import only_in_fuzz
from limits import HANG_S
from penstock import Auto, Pipeline, PipelineStage, Placement
from stage_training import CPU, Group, rank_in
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

NUM_RANKS, NUM_MICROBATCHES, WIDTH = 4, 8, 4
SLOW_RANK, SLOW_FROM, NUM_STEPS = 2, 10, 19
"""Plans are made after steps 3 and 17: the look at steps 12 to 14 finds the rank slow."""
ACTION_S = 0.005


class Slow(torch.autograd.Function):
    """An identity whose forward and backward sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class TimedStage(nn.Module):
    """Its F, I and W take `seconds` each."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = ACTION_S
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x, self.seconds, self.seconds) + Slow.apply(self.weight, 0, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Found:
    lines: list[str]
    schedules: list[str]
    chosen: Any


def train(group: Group) -> Found:
    rank = rank_in(group)
    placement = Placement.v(NUM_RANKS)
    modules = {index: TimedStage() for index in placement.stages_of(rank)}
    stages = [
        PipelineStage(module, index, placement.num_stages, CPU, group=group)
        for index, module in modules.items()
    ]
    with mock.patch("penstock.runtime.auto.auto_pilot.LOOK_EVERY", 8):
        pipeline = Pipeline(
            stages,
            Auto(replan_when=0.3, seconds=5),
            num_microbatches=NUM_MICROBATCHES,
            loss_fn=nn.functional.mse_loss,
            timeout=HANG_S,
        )
    x = torch.ones(NUM_MICROBATCHES, WIDTH, requires_grad=True)
    log, logger, found = _Lines(), logging.getLogger("penstock"), []
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        for step in range(NUM_STEPS):
            for module in modules.values():
                is_slow = rank == SLOW_RANK and step >= SLOW_FROM
                module.seconds = ACTION_S * (2 if is_slow else 1)
            pipeline.step(x, target=torch.zeros(NUM_MICROBATCHES, WIDTH))
            found.append(pipeline.schedule.to_csv())
    finally:
        logger.removeHandler(log)
        logger.setLevel(logging.NOTSET)
    return Found(log.lines, found, pipeline._runner._pilot._phase.chosen)  # type: ignore[union-attr]


@only_in_fuzz  # On a busy machine, other ranks are slow too.
def test_rank_that_is_twice_as_slow_is_named_and_planned_around(pool: WorkerPool) -> None:
    first, *others = pool.run(NUM_RANKS, train)
    assert all(first.schedules == other.schedules for other in others)
    named = [line for line in first.lines if "times as long as planned" in line]
    assert named[0].startswith(f"rank {SLOW_RANK} (host ")
    assert not any(other.lines for other in others)
    before, after = first.schedules[2], first.schedules[-1]
    assert [after] * 3 == first.schedules[16:]
    assert before == first.schedules[12] != after
    chosen = first.chosen
    assert chosen.is_new
    assert chosen.is_again
    assert chosen.after.step_s < chosen.before.step_s
    assert 0.9 <= 1 / (1 + chosen.gap)


class TimedLayer(nn.Module):
    """A layer that takes longer on the slow rank; it reads a value, so that it is not traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = x + 1
        seconds = 2e-3 * (2 if dist.get_rank() == SLOW_RANK else 1)
        return torch.tanh(self.linear(Slow.apply(x, seconds, seconds)))  # type: ignore[no-any-return, no-untyped-call]


def train_layers(group: Group, is_moving: bool) -> tuple[list[float], int]:
    """Return the losses, and the number of this rank's layers in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(TimedLayer() for _ in range(12))).double()
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    pipe = penstock.parallelize(
        model,
        x,
        loss_fn=nn.functional.mse_loss,
        schedule="ZB-H1",
        num_microbatches=4,
        cut=penstock.Balanced(NUM_RANKS, costs=[1.0] * 12),
        slow_when=0.5,
        group=group,
        timeout=HANG_S,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for step in range(12):
        optimizer.zero_grad()
        losses.append(pipe.step(x, target=target).item())
        optimizer.step()
        if step == 8 and is_moving:
            assert pipe.rebalance(optimizer)
    return losses, len(list(pipe.parameters())) // 2


def test_layers_move_away_from_a_slow_rank_without_a_trace_in_the_losses(pool: WorkerPool) -> None:
    expected = pool.run(NUM_RANKS, train_layers, False)
    found = pool.run(NUM_RANKS, train_layers, True)
    assert [losses for losses, _ in expected] == [losses for losses, _ in found]
    assert [3] * NUM_RANKS == [count for _, count in expected]
    counts = [count for _, count in found]
    assert 12 == sum(counts)
    assert counts[SLOW_RANK] in (1, 2)
    # What a layer costs is 1, and 2 on the slow rank: with 3 layers on each rank, that one took 6.
    assert 6 > max(count * (2 if r == SLOW_RANK else 1) for r, count in enumerate(counts))

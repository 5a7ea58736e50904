"""A program for torch.distributed.pipelining, which knows nothing of Penstock.

It trains stages of plain modules by each schedule that it is told, and prints losses and gradients.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    _PipelineSchedule,
    get_schedule_class,
)

NUM_MICROBATCHES, WIDTH = 4, 16


def make_module(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def train(name: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    kind = get_schedule_class(name)
    is_single = issubclass(kind, PipelineScheduleSingle)
    num_stages = num_ranks if is_single else 2 * num_ranks
    is_v = kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV)
    held = [rank] if is_single else [rank, num_stages - 1 - rank if is_v else rank + num_ranks]
    stages = [
        PipelineStage(make_module(index), index, num_stages, torch.device("cpu")) for index in held
    ]
    schedule: _PipelineSchedule = kind(
        stages[0] if is_single else stages, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    parameters = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(100)
    x = torch.randn(16, WIDTH)
    for step in range(3):
        optimizer.zero_grad()
        has_last = any(stage.is_last for stage in stages)
        losses: list[torch.Tensor] | None = [] if has_last else None
        args = (x,) if any(stage.is_first for stage in stages) else ()
        schedule.step(*args, target=x.roll(1, 1) if has_last else None, losses=losses)
        norm = torch.stack([weight.grad.norm() for weight in parameters]).norm().item()
        loss = "" if losses is None else f" loss {torch.stack(losses).mean().item():.5f}"
        sys.stdout.write(f"{name} rank {rank} step {step} norm {norm:.5f}{loss}\n")
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for schedule in sys.argv[1:]:
        train(schedule)
    dist.destroy_process_group()

"""One rank's part of a pipeline, alone in this process, over a transport that takes no time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from contenders import TORCH, TORCH_CLASSES, Contender, Entrant
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.testing._internal.distributed.fake_pg import FakeStore

import penstock
from penstock.comm import AbstractComm

WIDTH = 4
"""Stages are linear layers of this width: nothing but the time of the host counts."""
DEVICE = torch.device("cpu")


class _TorchStage(torch_pipelining.PipelineStage):
    """A stage that has agreed with the others that shapes are as in the examples."""

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ones(1, dtype=torch.int32)


class _Nothing:
    """A transfer that is over."""

    def wait(self, described: Any) -> None:
        pass


class NoComm(AbstractComm):
    """Channels on which every message has arrived; what is received stays as it was."""

    _done = _Nothing()

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    def gather(self, value: Any, what: str = "") -> list[Any]:
        raise NotImplementedError("Ranks meet before they are alone.")

    def open(self, channels: Any) -> None:
        pass

    def copies(self, receiver: int) -> bool:
        return True

    def needs_every_wait(self, other: int) -> bool:
        return False

    def send(self, tensor: Tensor, receiver: int) -> _Nothing:
        return self._done

    def recv(self, tensor: Tensor, sender: int) -> _Nothing:
        return self._done

    def fail(self, report: str) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def fake_group(rank: int, num_ranks: int) -> Iterator[None]:
    """Let this process be one rank of torch's fake process group, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Residual(nn.Module):
    """A linear layer, and its input added: the output of one alone is a view, where torch fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


def enter_alone(contender: Contender, rank: int, p: int, m: int) -> Entrant:
    """Return a rank's pipeline, ready to step by itself."""
    schedule = penstock.schedules.get(contender.schedule)(num_ranks=p, num_microbatches=m)
    held = schedule.placement.stages_of(rank)
    if contender.library == TORCH:
        modules = [Residual() for _ in held]
        pipeline = _torch_pipeline(contender.schedule, modules, held, schedule, m)
    else:
        modules, pipeline = _penstock_pipeline(schedule, rank, p)
    count = schedule.placement.num_stages
    return Entrant(contender, modules, pipeline, 0 in held, count - 1 in held)


def _torch_pipeline(
    name: str, modules: list[nn.Module], held: Any, schedule: penstock.Schedule, m: int
) -> Any:
    # With examples, torch does not ask the other ranks for shapes.
    outside, between = torch.zeros(1, 1, WIDTH), torch.zeros(1, 1, WIDTH, requires_grad=True)
    stages = [
        _TorchStage(
            module,
            stage,
            schedule.placement.num_stages,
            DEVICE,
            input_args=between if stage else outside,
            output_args=between,
        )
        for module, stage in zip(modules, held, strict=True)
    ]
    kind = TORCH_CLASSES[name]
    loss_fn = nn.functional.mse_loss
    if issubclass(kind, PipelineScheduleSingle):
        return kind(stages[0], m, loss_fn=loss_fn)
    return kind(stages, m, loss_fn=loss_fn)


def _penstock_pipeline(
    schedule: penstock.Schedule, rank: int, p: int
) -> tuple[list[nn.Module], Any]:
    """Let all ranks meet and take two steps in this process, and return one of them."""
    x = torch.zeros(schedule.num_microbatches, 1, WIDTH)

    def main(group: Any) -> tuple[list[nn.Module], penstock.Pipeline]:
        held = schedule.placement.stages_of(group.rank)
        modules = [Residual() for _ in held]
        stages = [
            penstock.PipelineStage(
                module, stage, schedule.placement.num_stages, DEVICE, group=group
            )
            for module, stage in zip(modules, held, strict=True)
        ]
        pipeline = penstock.Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            pipeline.step(x, target=x, return_outputs=False)
        return modules, pipeline

    modules, pipeline = penstock.local_ranks(p, main)[rank]
    pipeline._connection._comm = NoComm(rank, p)
    return modules, pipeline

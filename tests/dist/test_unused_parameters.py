"""Replicas of stages with parameters that some forwards do not use."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.errors import StageError
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

NUM_MICROBATCHES, ROWS, WIDTH = 4, 8, 4
SCHEDULES = {"1F1B": 1, "ZB-V": 2}
"""The number of stages per rank: backwards are whole in the first, and split in the second."""


class Block(nn.Module):
    """A layer, and another that is used in `used` of every four forwards; none if that is empty.

    With `is_skipped`, the first is not used in the others.
    """

    def __init__(self, used: tuple[int, ...] = (), *, is_skipped: bool = False) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.used, self.is_skipped, self.num_forwards = used, is_skipped, 0
        if used:
            self.at_times = nn.Linear(WIDTH, WIDTH)
            self.at_times.weight.register_hook(refuse_nothing)

    def forward(self, x: Tensor) -> Tensor:
        uses_other = self.num_forwards % NUM_MICROBATCHES in self.used
        self.num_forwards += 1
        if self.is_skipped and not uses_other:
            return x
        x = torch.tanh(self.always(x))
        return self.at_times(x) if uses_other else x


def refuse_nothing(grad: Tensor | None) -> None:
    assert grad is not None


class Net(nn.Module):
    def __init__(self, used: tuple[int, ...], is_skipped: bool) -> None:
        super().__init__()
        others = Block(), Block(), Block()
        self.blocks = nn.ModuleList([others[0], Block(used, is_skipped=is_skipped), *others[1:]])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_net(used: tuple[int, ...], *, is_skipped: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(used, is_skipped).double()


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, target = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, target


def spread(model: Net, schedule: str, *, num_ranks: int = 2) -> tuple[penstock.ParallelModel, int]:
    """Return a rank's part of a model in replicas on four ranks, and the number of its replica."""
    mesh = init_device_mesh("cpu", (num_ranks, 4 // num_ranks), mesh_dim_names=("pp", "dp"))
    num_stages = num_ranks * SCHEDULES[schedule]
    pipe = penstock.parallelize(
        model,
        batch_of(0, 0)[:1],
        loss_fn=nn.functional.mse_loss,
        mesh=mesh,
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        cut=penstock.cut_between_modules(model, num_stages, layers=["blocks"]),
    )
    return pipe, mesh["dp"].get_local_rank()


def train(
    _: dist.ProcessGroup, used: tuple[int, ...], is_skipped: bool, schedule: str
) -> list[dict[str, Any]]:
    """Return the gradients of two steps."""
    pipe, replica = spread(make_net(used, is_skipped=is_skipped), schedule)
    found = []
    for step in range(2):
        pipe.zero_grad()
        x, target = batch_of(step, replica)
        pipe.step(x, target=target)
        grads = {name: weight.grad for name, weight in pipe.named_parameters()}
        found.append(copy.deepcopy(grads))
    pipe.close()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("used", "is_skipped"),
    [((0,), False), ((1, 2), False), ((3,), False), ((1,), True)],
    ids=["first", "middle", "last", "first, and nothing else in others"],
)
def test_gradients_of_some_microbatches_are_averaged(
    used: tuple[int, ...], is_skipped: bool, schedule: str, fresh_pool: WorkerPool
) -> None:
    """If the last microbatch did not use a parameter, no gradient of its stage was averaged."""
    parts = fresh_pool.run(4, train, used, is_skipped, schedule)
    for step in range(2):
        model = make_net(used, is_skipped=is_skipped)
        for replica in range(2):
            x, target = (each.chunk(NUM_MICROBATCHES) for each in batch_of(step, replica))
            for part, wanted in zip(x, target, strict=True):
                loss = nn.functional.mse_loss(model(part), wanted)
                (loss / (2 * NUM_MICROBATCHES)).backward()
        expected = {name: weight.grad for name, weight in model.named_parameters()}
        assert expected.keys() == {name for part in parts for name in part[step]}
        for part in parts:
            for name, grad in part[step].items():
                torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-15)


def leave_unused(_: dist.ProcessGroup, schedule: str) -> str:
    """Return the error of a step of four replicas.

    Each is a pipeline of one rank: where there are others, some wait until this process ends.
    """
    model = make_net((NUM_MICROBATCHES,))  # No forward has this number.
    pipe, replica = spread(model, schedule, num_ranks=1)
    x, target = batch_of(0, replica)
    with pytest.raises(StageError) as caught:
        pipe.step(x, target=target)
    return str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameter_that_no_forward_uses_is_refused(schedule: str, fresh_pool: WorkerPool) -> None:
    """The first step once left all gradients of the stage as they were in each replica."""
    for text in fresh_pool.run(4, leave_unused, schedule):
        assert "stage 0 on rank 0: its parameter 'blocks.1.at_times.weight' and 1 more got" in text
        assert "freeze those that are not with requires_grad_(False), before the stage" in text


def freeze_unused(_: dist.ProcessGroup, schedule: str) -> list[str]:
    """Return the names of parameters without a gradient after a step."""
    model = make_net((NUM_MICROBATCHES,))
    model.blocks[1].at_times.requires_grad_(False)
    pipe, replica = spread(model, schedule)
    x, target = batch_of(0, replica)
    pipe.step(x, target=target)
    pipe.close()
    return [name for name, weight in pipe.named_parameters() if weight.grad is None]


def test_frozen_parameter_may_be_unused(fresh_pool: WorkerPool) -> None:
    names = ["blocks.1.at_times.weight", "blocks.1.at_times.bias"]
    assert [names] * 2 + [[]] * 2 == fresh_pool.run(4, freeze_unused, "1F1B")

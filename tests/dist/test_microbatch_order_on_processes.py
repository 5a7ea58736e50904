"""Microbatches that run by their work, in stages that others reduce or shard."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from limits import HANG_S
from local_steps import mean_square
from penstock import Pipeline, schedules
from stage_training import make_stages
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

WIDTH = 6
LENGTHS = {0: [3, 1, 5, 2], 1: [1, 4, 2, 6]}
"""The rows of each microbatch, by replica."""


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.layer(x).tanh() * scale


def train(world: dist.ProcessGroup, kind: str, name: str) -> list[tuple[list[Any], list[Any]]]:
    """Return the losses and gradients of a step in the given order, and of one by work."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    torch.manual_seed(replica)
    rows = LENGTHS[replica]
    xs, targets, scales = ([torch.randn(count, WIDTH).double() for count in rows] for _ in range(3))
    found = []
    for by_work in (False, True):
        torch.manual_seed(0)
        modules: list[nn.Module] = [Stage().double() for _ in range(schedule.num_stages)]
        held = schedule.placement.stages_of(mesh["pp"].get_local_rank())
        for index in held:
            if kind == "DDP":
                modules[index] = DistributedDataParallel(
                    modules[index], process_group=mesh["dp"].get_group()
                )
            else:
                fully_shard(modules[index], mesh=mesh["dp"])
        stages = make_stages(mesh["pp"].get_group(), modules, held, dynamic_shapes=True)
        pipeline = Pipeline(stages, schedule, loss_fn=mean_square, by_work=by_work, timeout=HANG_S)
        losses: list[Tensor] = []
        pipeline.step_microbatches(
            [(x,) for x in xs],
            [{"scale": scale} for scale in scales],
            targets=targets,
            losses=losses,
            weights=rows,
            work=rows if by_work else None,
        )
        grads = [param.grad for index in held for param in modules[index].parameters()]
        found.append((losses, [g.to_local() if isinstance(g, DTensor) else g for g in grads]))
    return found


@pytest.mark.parametrize("name", ["1F1B", "ZB-V", "InterleavedZeroBubble"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_replicas_with_other_orders_train_as_in_the_given_order(
    kind: str, name: str, fresh_pool: WorkerPool
) -> None:
    for (losses, grads), (other_losses, other_grads) in fresh_pool.run(4, train, kind, name):
        for one, other in zip(losses, other_losses, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)

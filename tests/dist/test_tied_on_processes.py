"""Tied parameters over processes: every copy gets the gradient of all, as if there were one.

`tests/runtime/test_tied_parameters.py` has more of it within one process.
"""

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from fuzzing import rotated
from limits import HANG_S
from local_steps import mean_square
from penstock import Pipeline, PipelineStage
from tied_models import TiedRecord, TiedRun, assert_trains_as_unsplit, train_tied
from worker_pool import LINKS, WorkerPool

pytestmark = pytest.mark.dist


@rotated(
    schedule=["1F1B", "Interleaved1F1B", "ZB-V"],
    num_ranks=[4, 2],
    steps_per_update=[1, 2],
    link=LINKS,
)
def test_copies_train_as_one_parameter(
    schedule: str, num_ranks: int, steps_per_update: int, link: str, pool: WorkerPool
) -> None:
    run = TiedRun(schedule, num_ranks, steps_per_update=steps_per_update)
    assert_trains_as_unsplit(run, pool.run(num_ranks, train_tied, run, link=link))


def _train_replicas(
    world: dist.ProcessGroup, run: TiedRun, is_bucket_view: bool
) -> list[TiedRecord]:
    """Ranks 0 and 1 are one pipeline, ranks 2 and 3 the other; each gets half of the batch."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    wrap = partial(
        DistributedDataParallel,
        process_group=replicas[rank % 2],
        bucket_cap_mb=0.0005,
        gradient_as_bucket_view=is_bucket_view,
    )
    try:
        return train_tied(pipelines[rank // 2], run, wrap, slice(rank // 2, None, 2))
    finally:
        gc.collect()  # A reducer is in a cycle, and with it lives its group.
        for group in (pipelines[rank // 2], replicas[rank % 2]):
            dist.destroy_process_group(group)


@rotated(
    num_cases=4,
    schedule=["1F1B", "ZB-V"],
    has_frozen_head={"all used": False, "one frozen": True},
    is_bucket_view={"own memory": False, "bucket views": True},
)
def test_copies_that_data_parallel_stages_hold(
    schedule: str, has_frozen_head: bool, is_bucket_view: bool, pool: WorkerPool
) -> None:
    run = TiedRun(schedule, 2, steps_per_update=2, has_frozen_head=has_frozen_head)
    results = pool.run(4, _train_replicas, run, is_bucket_view)
    for replica in (results[:2], results[2:]):
        assert_trains_as_unsplit(run, replica)


class Scale(nn.Module):
    """Multiplies by a replicated weight, whose gradient is a sum over the shards of the batch."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        weight = torch.linspace(0.5, 1.5, 3).double()
        self.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        rows = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        scaled: Tensor = (rows * self.weight).full_tensor()
        return scaled


def _train_scales(world: dist.ProcessGroup) -> list[tuple[Any, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    rank, module = mesh.get_local_rank("pp"), Scale(mesh["tp"])
    stage = PipelineStage(
        module, rank, 2, "cpu", group=mesh.get_group("pp"), tied={"weight": "scale"}
    )
    pipeline = Pipeline(stage, "1F1B", num_microbatches=2, loss_fn=mean_square, timeout=HANG_S)
    x = torch.arange(24.0).view(8, 3).double()
    found = []
    for _ in range(2):  # The second adds to the gradient of the first.
        pipeline.step(x, target=x)
        grad = module.weight.grad
        found.append((grad.placements, grad.to_local().clone()))
    return found


def test_copies_that_are_replicated_over_a_mesh(fresh_pool: WorkerPool) -> None:
    weight = torch.linspace(0.5, 1.5, 3).double().requires_grad_()
    x = torch.arange(24.0).view(8, 3).double()
    mean_square(x * weight * weight, x).backward()
    for steps in fresh_pool.run(4, _train_scales):
        for number, (placements, grad) in enumerate(steps, 1):
            assert (Replicate(),) == placements
            torch.testing.assert_close(grad, number * weight.grad, rtol=1e-14, atol=0.0)

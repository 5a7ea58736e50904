"""The schedule that replicas find while training: one for all, though they measure other costs."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from limits import HANG_S
from local_steps import mean_square
from penstock import CostTable, Pipeline, PipelineStage, Placement
from penstock.comm.pipelines_together import Peers
from penstock.errors import AgreementError, CommError, PipelineError
from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.measuring.measuring_steps import average
from stage_training import assert_close
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

WIDTH = 4
NUM_STEPS = 5
PLACEMENT = Placement((0, 1, 1, 0))
# The first replica finds its first stages slow, the second one its last.
COSTS = [
    CostTable(forward=f, backward_input=i, backward_weight=w, delay=d)
    for f, i, w, d in (
        ([9, 1, 1, 1], [9, 1, 1, 1], [1, 1, 1, 9], 0.0),
        ([1, 1, 1, 9], [1, 1, 5, 1], [9, 1, 1, 1], 3.0),
    )
]


def make_modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in PLACEMENT.ranks]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, target = torch.randn(2, 16, WIDTH).double()
    return x, target


def wrap(kind: str, module: nn.Module, mesh: DeviceMesh, *, is_last: bool = False) -> nn.Module:
    if kind == "DDP":
        return DistributedDataParallel(module, process_group=mesh.get_group())
    if kind == "FSDP2":
        return fully_shard(module, mesh=mesh)
    style = ColwiseParallel(output_layouts=Replicate(), use_local_output=is_last)
    return parallelize_module(module, mesh, {"0": style})


def train(world: Any, kind: str) -> tuple[list[str], dict[str, Tensor]]:
    """The schedules that a rank ran, and its gradients after the last step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    modules = make_modules()
    held = PLACEMENT.stages_of(rank)
    wrapped = {index: wrap(kind, modules[index], mesh["dp"], is_last=index == 3) for index in held}
    stages = [PipelineStage(wrapped[i], i, 4, "cpu", group=mesh["pp"]) for i in held]
    pipeline = Pipeline(
        stages, Auto(seconds=0.5), num_microbatches=4, loss_fn=mean_square, timeout=HANG_S
    )
    x, target = batch()
    if kind != "tensor parallel":
        x, target = x.chunk(2)[replica], target.chunk(2)[replica]
    ran = []
    with mock.patch("penstock.runtime.auto.auto_pilot.join", return_value=COSTS[replica]):
        for _ in range(NUM_STEPS):
            for module in wrapped.values():
                module.zero_grad()
            pipeline.step(x, target=target)
            ran.append(pipeline.schedule.to_csv())
    pipeline.close()
    grads = {}
    for index, module in wrapped.items():
        for name, param in module.named_parameters():
            assert param.grad is not None
            grad = param.grad
            full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            grads[f"{index}.{name.removeprefix('module.')}"] = full
    return ran, grads


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "tensor parallel"])
def test_replicas_run_one_schedule_and_train_as_the_unsplit_model(
    kind: str, fresh_pool: WorkerPool
) -> None:
    results = fresh_pool.run(4, train, kind)
    for ran, _ in results:
        assert results[0][0] == ran
    assert len(set(results[0][0])) > 1
    model = nn.Sequential(*make_modules())
    x, target = batch()
    mean_square(model(x), target).backward()
    for _, grads in results:
        for name, grad in grads.items():
            assert_close(name, model.get_parameter(name).grad, grad)


def disagree(world: Any) -> list[str]:
    """What ranks say if replicas have other options, and if a decision fails on one of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    module = wrap("DDP", make_modules()[rank], mesh["dp"])
    stage = PipelineStage(module, rank, 2, "cpu", group=mesh["pp"])
    auto = Auto(measure_steps=1 + replica)
    pipeline = Pipeline(stage, auto, num_microbatches=2, loss_fn=mean_square, timeout=HANG_S)
    said = []
    x, target = batch()
    try:
        pipeline.step(x, target=target)
    except PipelineError as error:
        said.append(f"{type(error).__name__}: {error}")
    peers = Peers.of([mesh.get_group("dp")], torch.device("cpu"), HANG_S)
    try:
        peers.decide(replica, lambda values: values[2], "a number")
    except (IndexError, CommError) as error:
        said.append(f"{type(error).__name__}: {error}")
    everyone = Peers.of([*mesh.get_all_groups(), world, mesh.get_group("pp")], peers.device, HANG_S)
    found = everyone.gather(dist.get_rank(), "all ranks")
    return [*said, str(sorted(set(found))), str(everyone.decide(rank, len, "how many"))]


def test_replicas_that_would_plan_apart_are_refused(fresh_pool: WorkerPool) -> None:
    for rank, (options, failed, found, count) in enumerate(fresh_pool.run(4, disagree)):
        expected = "the replicas disagree on schedule (replica 0: auto, memory=None, replan_when="
        assert expected in options
        assert options.startswith(AgreementError.__name__ if rank % 2 == 0 else "CommError")
        said = "IndexError: list index out of range"
        if rank >= 2:
            said = (
                "CommError: stopped waiting for a number, because it failed in another replica: "
                "IndexError: list index out of range. Look at the first error of each."
            )
        assert said == failed
        assert "[0, 1, 2, 3]" == found
        assert "16" == count


def test_costs_of_replicas_are_averaged_and_their_memory_is_the_largest() -> None:
    first, second = COSTS
    assert first is average([first])
    mean = average([first, second])
    assert (5, 1, 1, 5) == mean.forward
    assert (1.5, 1.5, 1.5) == mean.delay
    small, large = (CostTable.uniform(2, after_forward=memory) for memory in (1.0, 5.0))
    assert (5.0, 5.0) == average([small, large]).after_forward

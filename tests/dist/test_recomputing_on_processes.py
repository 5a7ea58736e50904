"""Forwards that run twice in stages that others reduce, shard or spread, to the last bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fuzzing import rotated
from local_steps import mean_square
from penstock import Pipeline, Schedule, schedules
from penstock.errors import AgreementError
from penstock.passes import add_gathers, add_recompute
from penstock.passes.gathering import Gathers
from recomputed_steps import recomputed
from stage_training import make_stages
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

WIDTH = 8
NUM_STAGES = 2


class Block(nn.Module):
    """It draws, and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(self.down(self.up(x).tanh())))
        return x + y


def wrap(kind: str, block: Block, mesh: DeviceMesh) -> nn.Module:
    if kind == "DDP":
        return DistributedDataParallel(block, process_group=mesh.get_group())
    if kind == "tensor parallel":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(block, mesh, plan)
    frees: Any = {"freed": True, "kept": False, "freed by half": 2}[kind.removeprefix("FSDP2, ")]
    fully_shard(block.up, mesh=mesh, reshard_after_forward=frees)
    return fully_shard(block, mesh=mesh, reshard_after_forward=frees)


def train(
    group: dist.ProcessGroup,
    kind: str,
    schedule: Schedule,
    mesh: DeviceMesh,
    parts: Sequence[str] | None = None,
) -> list[Any]:
    """Gradients, losses and buffers of two steps; R runs the stages again, or parts of them."""
    torch.manual_seed(0)
    modules = [wrap(kind, Block().double(), mesh) for _ in range(NUM_STAGES)]
    torch.manual_seed(dist.get_rank() if "parallel" not in kind else 0)
    stages = make_stages(group, modules, range(NUM_STAGES), recomputed=parts)
    pipeline = Pipeline(stages, schedule, loss_fn=mean_square)
    x, target = torch.randn(2, 8, WIDTH).double()
    losses: list[Tensor] = []
    for _ in range(2):
        pipeline.step(x, target=target, losses=losses)
    grads = [local(param.grad) for module in modules for param in module.parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    return [*grads, *losses, *buffers, torch.get_rng_state()]


def local(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad


def compare(
    world: dist.ProcessGroup, kind: str, csv: str, parts: Sequence[str] | None = None
) -> list[list[bool]]:
    """Whether each value is the same as without recomputation, for each way to recompute."""
    size = dist.get_world_size(world)
    mesh = init_device_mesh("cpu", (size,))
    own = [dist.new_group([rank]) for rank in range(size)][dist.get_rank()]
    schedule = Schedule.from_csv(csv)
    again = recomputed(schedule)
    if "FSDP2" in kind:
        again["gathered"] = add_gathers(add_recompute(schedule), Gathers.per_need(ahead=0))
    expected = train(own, kind, schedule, mesh)
    return [
        [torch.equal(one, other) for one, other in zip(expected, found, strict=True)]
        for each in again.values()
        for found in [train(own, kind, each, mesh, parts)]
    ]


FULL = "0F0,1F0,0F1,1B0,1F1,0B0,1B1,0B1\n"
SPLIT = "0F0,1F0,0F1,1I0,1F1,0I0,1W0,1I1,0I1,0W0,1W1,0W1\n"
KINDS = ["DDP", "tensor parallel", "FSDP2, freed", "FSDP2, kept", "FSDP2, freed by half"]


@rotated(kind=KINDS, csv={"full": FULL, "split": SPLIT}, num_cases=2 * len(KINDS))
def test_wrapped_stages_give_the_same(kind: str, csv: str, fresh_pool: WorkerPool) -> None:
    for each in fresh_pool.run(4, compare, kind, csv):
        assert len(each) in (3, 4)
        assert all(map(all, each)), each


@rotated(
    kind=KINDS,
    csv={"full": FULL, "split": SPLIT},
    parts=[["up", "drop"], ["norm", "down"], ["up", "norm", "drop", "down"]],
    num_cases=2 * len(KINDS),
)
def test_parts_of_wrapped_stages_give_the_same(
    kind: str, csv: str, parts: list[str], fresh_pool: WorkerPool
) -> None:
    for each in fresh_pool.run(4, compare, kind, csv, parts):
        assert len(each) in (3, 4)
        assert all(map(all, each)), each


def recompute_unlike(world: dist.ProcessGroup, kind: str) -> str:
    """Return the error of ranks that recompute different parts of the same stages, if any."""
    mesh = init_device_mesh("cpu", (2,))
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    schedule = add_recompute(Schedule.from_csv(FULL))
    try:
        train(own, kind, schedule, mesh, [["up", "down"], ["norm"]][dist.get_rank()])
    except AgreementError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["tensor parallel", "FSDP2, freed"])
def test_ranks_that_compute_together_recompute_the_same_parts(kind: str, pool: WorkerPool) -> None:
    """They used to wait for each other in different collectives."""
    ours, theirs = (
        f"{{'stage 0': {each}, 'stage 1': {each}}}" for each in (["down", "up"], ["norm"])
    )
    expected = f"the pipelines disagree on recomputed (pipeline 0: {ours}; pipeline 1: {theirs}). "
    for error in pool.run(2, recompute_unlike, kind):
        assert error.startswith(expected)


def test_replicas_may_recompute_different_parts(pool: WorkerPool) -> None:
    """The forwards of DistributedDataParallel run alone."""
    assert ["no error"] * 2 == pool.run(2, recompute_unlike, "DDP")


def train_a_stage_each(
    group: dist.ProcessGroup, name: str, kind: str, parts: Sequence[str] | None = None
) -> list[Tensor]:
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    if kind != "none":
        schedule = recomputed(schedule)[kind]
    torch.manual_seed(dist.get_rank())
    held = schedule.placement.stages_of(dist.get_rank())
    modules = [Block().double() if index in held else None for index in range(schedule.num_stages)]
    stages = make_stages(group, modules, held, recomputed=parts)
    pipeline = Pipeline(stages, schedule, loss_fn=mean_square)
    torch.manual_seed(0)
    x, target = torch.randn(2, 8, WIDTH).double()
    losses: list[Tensor] = []
    for _ in range(2):
        pipeline.step(x, target=target, losses=losses)
    own = [module for module in modules if module is not None]
    grads = [local(param.grad) for module in own for param in module.parameters()]
    return [*grads, *losses, *(buffer for module in own for buffer in module.buffers())]


@rotated(
    name=["1F1B", "ZB-H1", "ZB-V", "DualPipeV"],
    kind=["all", "some", "early"],
    parts={"whole": None, "parts": ["norm", "down"]},
    num_cases=8,
)
def test_ranks_that_exchange_messages_give_the_same(
    name: str, kind: str, parts: list[str] | None, pool: WorkerPool
) -> None:
    expected = pool.run(2, train_a_stage_each, name, "none")
    again = pool.run(2, train_a_stage_each, name, kind, parts)
    for wanted, found in zip(expected, again, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))

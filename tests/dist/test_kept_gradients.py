"""Steps with finalize_gradients=False keep the gradients of FSDP2 stages for a later one."""

import inspect
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import nn

import mesh_training
from fuzzing import rotated
from mesh_training import (
    NUM_MICROBATCHES,
    ROWS,
    TOKENS,
    WIDTH,
    WRAPPINGS,
    counting,
    make_meshes,
    make_stages,
    mean_square,
)
from penstock import compat
from torch_in_meshes import TORCH_CLASSES
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

FINALIZES = [False, False, True, True]
"""What the steps are given; gradients are set to zero after the third."""
CAN_TORCH = "finalize_gradients" in inspect.signature(torch_pipelining.Schedule1F1B.step).parameters


class Kept(NamedTuple):
    """What a rank found."""

    differences: list[float]
    """The largest of any gradient from the whole model's, after the last two steps."""
    are_missing: list[bool]
    """Whether no parameter has a gradient, after each step."""
    reductions: list[int]
    completed: list[int]
    """How often on_grads_ready was called, in each step."""
    num_stages: int


def accumulate(_: dist.ProcessGroup, name: str, wrapping: str, library: Any) -> Kept:
    meshes = make_meshes(wrapping)
    theirs, per_rank, shape = TORCH_CLASSES[name]
    num_stages, rank = 2 * per_rank, meshes["pp"].get_local_rank()
    held = {"linear": [rank], "loop": [rank, rank + 2], "v": [rank, num_stages - 1 - rank]}[shape]
    whole, modules = make_stages("plain", num_stages), make_stages("plain", num_stages)
    own = {index: WRAPPINGS[wrapping].wrap(modules[index], meshes) for index in held}
    package = compat if library == "compat" else torch_pipelining
    group = meshes["pp"].get_group()
    stages = [
        package.PipelineStage(module, index, num_stages, "cpu", group=group)
        for index, module in own.items()
    ]
    ready: list[int] = []
    options = (
        {"on_grads_ready": lambda stage: ready.append(stage.stage_index)}
        if package is compat
        else {}
    )
    schedule = getattr(package, theirs.__name__)(
        stages[0] if per_rank == 1 else stages, NUM_MICROBATCHES, loss_fn=mean_square, **options
    )
    pairs = [
        pair
        for index in held
        for pair in zip(own[index].parameters(), whole[index].parameters(), strict=True)
    ]
    replica, rows = replica_of(meshes)
    found = Kept([], [], [], [], len(held))
    for number, finalizes in enumerate(FINALIZES):
        torch.manual_seed(100 + number)
        x, target = torch.randn(2, rows, TOKENS, WIDTH).double()
        mean_square(nn.Sequential(*whole)(x), target).backward()
        own_rows = slice(replica * ROWS, (replica + 1) * ROWS)
        args = (x[own_rows],) if 0 in own else ()
        ready.clear()
        with counting() as counts:
            schedule.step(
                *args,
                target=target[own_rows] if num_stages - 1 in own else None,
                finalize_gradients=finalizes,
            )
        found.reductions.append(len(counts.reductions))
        found.completed.append(len(ready))
        found.are_missing.append(all(mine.grad is None for mine, _ in pairs))
        if finalizes:
            found.differences.append(
                max(mesh_training._difference(mine.grad, other.grad) for mine, other in pairs)
            )
            for module in (*own.values(), *whole):
                module.zero_grad()
    return found


def replica_of(meshes: Any) -> tuple[int, int]:
    """Return the number of this process's replica, and the rows of the whole batch."""
    replica, num_replicas = 0, 1
    for name in meshes.replicas:
        replica = replica * meshes[name].size() + meshes[name].get_local_rank()
        num_replicas *= meshes[name].size()
    return replica, ROWS * num_replicas


@rotated(
    name=["1F1B", "Interleaved1F1B", "ZB-V", "DualPipeV"],
    wrapping=["FSDP2", "FSDP2, True", "FSDP2 on the stage", "replicate"],
)
def test_kept_gradients_are_reduced_with_those_of_the_step_that_finalizes(
    name: str, wrapping: str, fresh_pool: WorkerPool
) -> None:
    """The sum over steps is that of the whole model, by one reduction for each group."""
    for found in fresh_pool.run(4, accumulate, name, wrapping, "compat"):
        assert max(found.differences) < 1e-12
        assert [True, True, False, False] == found.are_missing
        assert [0, 0] == found.reductions[:2]
        assert found.reductions[2] == found.reductions[3] > 0
        assert [0, 0, found.num_stages, found.num_stages] == found.completed


@pytest.mark.skipif(not CAN_TORCH, reason="new in torch 2.15, and another torch is installed")
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZB-V"])
def test_torch_keeps_the_same(name: str, fresh_pool: WorkerPool) -> None:
    ours = fresh_pool.run(4, accumulate, name, "FSDP2, False", "compat")
    theirs = fresh_pool.run(4, accumulate, name, "FSDP2, False", "torch")
    for own, other in zip(ours, theirs, strict=True):
        assert max(*own.differences, *other.differences) < 1e-12
        assert other.are_missing == own.are_missing
        assert other.reductions == own.reductions

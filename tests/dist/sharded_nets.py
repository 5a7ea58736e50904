"""A pipeline of 2 ranks whose stages are plain, reduced, sharded or tensor parallel, twice.

The processes are a mesh of 2 x 2: the ranks of a pipeline, by those that hold the same stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from limits import HANG_S
from local_steps import mean_square
from penstock import Pipeline, PipelineStage, schedules

WIDTH, HIDDEN, SIZE = 5, 6, 16


class Spike(torch.autograd.Function):
    """The identity of a weight, whose gradient overflows in a microbatch with a large value."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.overflows = bool(x.abs().max() > 1e3)
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * torch.inf if ctx.overflows else grad, None


class Block(nn.Module):
    """Two linear layers; some have a gain, which stages may share."""

    def __init__(self, has_gain: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        if has_gain:
            self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.layers(x)
        return y * Spike.apply(self.gain, x) if hasattr(self, "gain") else y


def make_blocks(is_tied: bool = False, num_blocks: int = 4) -> list[nn.Module]:
    """The stages before they are wrapped; the first and the last may share a parameter."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [
        Block(is_tied and index in (0, num_blocks - 1)).double() for index in range(num_blocks)
    ]
    return blocks


def make_whole(is_tied: bool = False, num_blocks: int = 4) -> nn.Sequential:
    """The whole model, with one parameter where stages have copies."""
    blocks = make_blocks(is_tied, num_blocks)
    if is_tied:
        blocks[-1].gain = blocks[0].gain
    return nn.Sequential(*blocks)


def make_batch(number: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, target = torch.randn(2, SIZE, WIDTH, dtype=torch.float64, generator=generator)
    return x, target


def wrap(kind: str, block: Any, mesh: DeviceMesh) -> nn.Module:
    match kind:
        case "ddp":
            return DistributedDataParallel(block, process_group=mesh.get_group())
        case "fsdp" | "fsdp, freed":
            frees = {"reshard_after_forward": True} if kind != "fsdp" else {}
            fully_shard(block.layers, mesh=mesh, **frees)
            return fully_shard(block, mesh=mesh, **frees)
        case "tp":
            plan = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
    return block


@dataclass
class Rank:
    """What a process holds: its part of one of the pipelines."""

    pipeline: Pipeline
    modules: dict[int, nn.Module]
    """The blocks by stage, with the names of the model; what is around them has other names."""
    replica: int
    mesh: DeviceMesh

    @property
    def stages(self) -> list[PipelineStage]:
        return list(self.pipeline.stages.values())

    def parameters(self) -> list[nn.Parameter]:
        return [weight for module in self.modules.values() for weight in module.parameters()]

    def zero_grad(self) -> None:
        for module in self.modules.values():
            module.zero_grad()

    def named(self) -> dict[str, nn.Parameter]:
        return {
            f"{index}.{name}": weight
            for index, module in self.modules.items()
            for name, weight in module.named_parameters()
        }

    def grads(self) -> dict[str, Tensor | None]:
        """The gradients under the names of the whole model, each in full."""
        return {name: in_full(weight.grad) for name, weight in self.named().items()}

    def values(self) -> dict[str, Tensor | None]:
        return {name: in_full(weight.detach()) for name, weight in self.named().items()}


def in_full(tensor: Any) -> Tensor | None:
    full: Tensor | None = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return None if full is None else full.clone()


def make_rank(
    kinds: Sequence[str],
    schedule_name: str = "ZB-V",
    *,
    shape: tuple[int, int] = (2, 2),
    is_tied: bool = False,
    blocks: list[nn.Module] | None = None,
    **options: Any,
) -> Rank:
    """This process's part; `kinds` has one word for each stage of the pipeline."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "replicas"))
    group, replica = mesh.get_group("pipeline"), mesh.get_local_rank("replicas")
    num_ranks = dist.get_world_size(group)
    schedule = schedules.get(schedule_name)(
        num_ranks=num_ranks, num_microbatches=4, stages_per_rank=len(kinds) // num_ranks
    )
    modules = dict(enumerate(make_blocks(is_tied, len(kinds)) if blocks is None else blocks))
    held = schedule.placement.stages_of(dist.get_rank(group))
    modules = {index: modules[index] for index in held}
    stages = [
        PipelineStage(
            wrap(kinds[index], modules[index], mesh["replicas"]),
            index,
            len(kinds),
            "cpu",
            group=group,
            tied={"gain": "gain"} if is_tied and index in (0, len(kinds) - 1) else None,
        )
        for index in held
    ]
    options = {"loss_fn": mean_square, "timeout": HANG_S, **options}
    return Rank(Pipeline(stages, schedule, **options), modules, replica, mesh)


def own_half(rank: Rank, values: Tensor) -> Tensor:
    """The part of a batch that this replica trains on."""
    return values.chunk(rank.mesh.size(1))[rank.replica]


def assert_near(name: str, expected: Tensor | None, actual: Tensor | None) -> None:
    """Values differ only by the order in which they were added up, in 64 bits."""
    torch.testing.assert_close(
        actual, expected, rtol=0.0, atol=1e-12, msg=lambda text: f"{name}: {text}"
    )

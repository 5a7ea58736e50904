"""Modules with DTensor parameters, for `test_tensor_parallel.py`; each case says what it shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Mlp(nn.Module):
    def __init__(self, hidden: int = 12, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


COLUMNS_THEN_ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    """A block whose activations are sharded by sequence between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


SEQUENCE_PLAN = {
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


def block(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(Block(), mesh, dict(SEQUENCE_PLAN))


def mlp(mesh: DeviceMesh, **options: Any) -> nn.Module:
    return parallelize_module(Mlp(**options), mesh, dict(COLUMNS_THEN_ROWS))


def prepared_mlp(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """DTensors from one layer to the next."""
    plan = {
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
    }
    module = parallelize_module(Mlp(**options), mesh, plan)
    to_local = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
    return parallelize_module(module, mesh, to_local)


def frozen(mesh: DeviceMesh) -> nn.Module:
    module = mlp(mesh)
    module.up.weight.requires_grad_(False)
    module.down.bias.requires_grad_(False)
    return module


class Twice(nn.Module):
    """One layer used twice, and one weight that two layers share."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first, self.second = mlp(mesh), mlp(mesh)
        self.second.up.weight = self.first.up.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(self.first(x)))
        return y


class Checkpointed(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first, self.second = mlp(mesh), block(mesh)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.first, x, use_reentrant=False)
        z: Tensor = checkpoint(self.second, y, use_reentrant=False)
        return z


class Autocast(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = mlp(mesh)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.inner(x)
        return y.float()


class Mixed(nn.Module):
    """A plain layer between parallel ones, given what a collective is still filling."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.parallel = mlp(mesh)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.last = mlp(mesh)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.plain(self.parallel(x)))
        return y


class Matrices(nn.Module):
    """Products that are not layers: of matrices, and of the matrices of experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.columns = nn.Parameter(distributed(torch.randn(WIDTH, 6), mesh, Shard(1)))
        self.experts = nn.Parameter(distributed(torch.randn(4, 3, 2), mesh, Shard(0)))
        self.local_experts = nn.Parameter(distributed(torch.randn(4, 2, 3), mesh, Shard(0)))

    def forward(self, x: Tensor) -> Tensor:
        rows = DTensor.from_local(x.reshape(-1, WIDTH), self.mesh, [Replicate()], run_check=False)
        y = (rows @ self.columns).to_local()  # Some of the columns on each rank.
        given = y.reshape(-1, 2, 3)[:2]  # As if these tokens were for the experts of this rank.
        tokens = DTensor.from_local(given, self.mesh, [Shard(0)], run_check=False)
        z = torch.bmm(tokens, self.experts).to_local()
        return torch.bmm(z, self.local_experts.to_local())


class Placed(nn.Module):
    """A linear layer with any placements of its parameters and its input."""

    def __init__(
        self,
        mesh: DeviceMesh,
        weight: list[Placement],
        x: list[Placement],
        *,
        is_strided: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.mesh, self.of_x, self.is_strided = mesh, x, is_strided
        of_bias: list[Placement] = [
            placement if placement == Shard(0) else Replicate() for placement in weight
        ]

        def place(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, param in list(module.named_parameters(recurse=False)):
                placements = weight if name == "weight" else of_bias
                placed = nn.Parameter(distribute_tensor(param, mesh, placements))
                module.register_parameter(name, placed)

        self.linear = distribute_module(nn.Linear(WIDTH, 6, bias=bias), mesh, place)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_strided:
            x = x.transpose(0, 1)
        out = self.linear(DTensor.from_local(x, self.mesh, self.of_x, run_check=False))
        if any(placement.is_partial() for placement in out.placements):
            out = out.redistribute(placements=[Replicate()] * self.mesh.ndim)
        y: Tensor = out.to_local()
        return y


def distributed(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return distribute_tensor(tensor.double(), mesh, [placement])


@dataclass(frozen=True)
class Case:
    make: Callable[[DeviceMesh], nn.Module]
    shape: tuple[int, ...] = (2, 4, WIDTH)
    dtype: torch.dtype = torch.float64
    weight_flops_per_row: int | None = None
    """Of the products on one rank that must wait until W; None if that is not looked at."""
    is_quiet: bool = True
    """Whether W communicates with no other rank."""
    before: Placement | None = None
    """The placement of the gradients that parameters have before; None if they have none."""


def placed(weight: list[Placement], x: list[Placement], **options: Any) -> Any:
    return lambda mesh: Placed(mesh, weight, x, **options)


_MLP = 2 * 2 * WIDTH * 12
_LINEAR = 2 * WIDTH * 6
ON_TWO = {
    "columns, then rows": Case(mlp, weight_flops_per_row=_MLP // 2),
    "no bias": Case(lambda mesh: mlp(mesh, bias=False), weight_flops_per_row=_MLP // 2),
    "matrix": Case(mlp, shape=(6, WIDTH), weight_flops_per_row=_MLP // 2),
    "uneven shards": Case(lambda mesh: prepared_mlp(mesh, hidden=7)),
    "sequence": Case(block, weight_flops_per_row=_MLP),  # Twice as many rows as in the input.
    "prepared": Case(prepared_mlp, weight_flops_per_row=_MLP // 2),
    "frozen": Case(frozen, weight_flops_per_row=_MLP // 4),
    "twice": Case(Twice, weight_flops_per_row=_MLP // 2 * 3),
    "checkpointed": Case(Checkpointed),
    "autocast": Case(Autocast, dtype=torch.float32, weight_flops_per_row=_MLP // 2),
    "mixed": Case(Mixed, weight_flops_per_row=_MLP + 2 * WIDTH * WIDTH),
    "matrices": Case(Matrices, shape=(4, WIDTH)),
    "rows": Case(placed([Replicate()], [Shard(0)]), weight_flops_per_row=_LINEAR),
    "rows, added to partial sums": Case(placed([Replicate()], [Shard(0)]), before=Partial()),
    "rows, added to sums": Case(
        placed([Replicate()], [Shard(0)]), is_quiet=False, before=Replicate()
    ),
    "uneven rows": Case(placed([Shard(0)], [Replicate()]), shape=(7, WIDTH)),
    "strided": Case(
        placed([Shard(0)], [Replicate()], is_strided=True), weight_flops_per_row=_LINEAR // 2
    ),
    "partial": Case(placed([Replicate()], [Partial()], bias=False)),
    "average": Case(placed([Replicate()], [Partial("avg")], bias=False)),
    # Such an input is left to autograd.
    "middle": Case(placed([Replicate()], [Shard(1)]), weight_flops_per_row=0),
    # No rank can compute its part of this product alone.
    "odd pair": Case(placed([Shard(1)], [Shard(0)]), is_quiet=False),
}
ON_FOUR = {  # On a mesh of 2 x 2.
    "plane, columns": Case(
        placed([Replicate(), Shard(0)], [Shard(0), Replicate()]),
        weight_flops_per_row=_LINEAR // 2,
    ),
    "plane, both": Case(
        placed([Shard(0), Shard(1)], [Replicate(), Shard(2)]),
        shape=(2, 4, WIDTH // 2),
        weight_flops_per_row=_LINEAR // 4,
    ),
    "plane, sums": Case(
        placed([Shard(0), Replicate()], [Shard(0), Shard(0)]), weight_flops_per_row=_LINEAR
    ),
}

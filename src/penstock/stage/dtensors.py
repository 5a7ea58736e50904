"""DTensors between stages: the local part travels, and everything else is in its `Spread`."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.comm.collective_results import waited
from penstock.torch_private import is_dtensor, mesh_layout


@dataclass(frozen=True, slots=True)
class Spread:
    """The way a DTensor lies on the ranks of a mesh: all about it except its local part.

    The strides of the whole are left out: like any tensor, it arrives contiguous.
    """

    shape: torch.Size
    """The shape of the whole tensor."""
    placements: tuple[Any, ...]
    dim_names: tuple[str, ...]
    """The names of the mesh's dimensions; empty if it has none."""
    sizes: tuple[int, ...]
    """The sizes of the mesh's dimensions."""
    coordinate: tuple[int, ...] | None = field(compare=False)
    """This rank's place on the mesh; None if it is not on it."""
    layout: Any = field(compare=False)
    """The mesh's place among all ranks, as torch gives it to `get_mesh`."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Spread | None":
        """Return the spread of a DTensor; None for any other tensor."""
        if not is_dtensor(tensor):
            return None
        mesh = tensor.device_mesh  # type: ignore[attr-defined]  # a DTensor has one
        placements = tensor.placements  # type: ignore[attr-defined]  # a DTensor has them
        return cls(tensor.shape, placements, *dims_of(mesh), coordinate_on(mesh), mesh_layout(mesh))

    @property
    def untold_placement(self) -> Any:
        """A placement that holds values, as a row-wise embedding's does; None if there is none."""
        known = ("Shard", "Replicate", "Partial", "_StridedShard")
        return next((p for p in self.placements if type(p).__name__ not in known), None)

    def __str__(self) -> str:
        return f"a DTensor of shape {tuple(self.shape)} with {self.in_words}"

    @property
    def in_words(self) -> str:
        placements = ", ".join(map(repr, self.placements))
        return f"placements ({placements}) on a mesh with {dims_in_words(self)}"

    def whole(self, local: Tensor, mesh: Any) -> Tensor:
        """Return the DTensor on `mesh` with this local part, as a leaf."""
        from torch.distributed.tensor import DTensor  # Late: it takes a while to load.

        stride = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        with torch.no_grad():
            return DTensor.from_local(
                local, mesh, self.placements, run_check=False, shape=self.shape, stride=stride
            )


def local_part(tensor: Tensor) -> Tensor:
    """Return the values that this rank holds of a DTensor; any other tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # a method of DTensor
    return waited(local)


def copy_with_spread(tensor: Tensor) -> Tensor:
    """Return a copy that is spread like a tensor: clone() of a DTensor adds up what is Partial."""
    spread = Spread.of(tensor)
    if spread is None:
        return tensor.clone()
    mesh = tensor.device_mesh  # type: ignore[attr-defined]  # a DTensor has one
    local = local_part(tensor).clone(memory_format=torch.contiguous_format)
    return spread.whole(local, mesh).requires_grad_(tensor.requires_grad)


def dims_of(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of a mesh's dimensions, if they have names, and their sizes."""
    return tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)


def dims_in_words(spread: Spread) -> str:
    sizes = " x ".join(map(str, spread.sizes))
    if not spread.dim_names:
        return f"unnamed dimensions, {sizes} ranks"
    names = ", ".join(map(repr, spread.dim_names))
    return f"dimensions ({names}), {sizes} ranks"


def coordinate_on(mesh: Any) -> tuple[int, ...] | None:
    """Return this rank's place on a mesh; None if it is not on it."""
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else tuple(coordinate)

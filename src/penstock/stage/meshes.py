"""The meshes on which a stage builds the DTensors that it receives.

A message names the dimensions of the sender's mesh. The receiver's mesh has the same dimensions
and other ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import StageError
from penstock.stage.dtensors import Spread, coordinate_on, dims_in_words, dims_of
from penstock.torch_private import is_dtensor

GetMesh: TypeAlias = Callable[[tuple[str, ...], Any], DeviceMesh]
"""A function from a mesh's dimension names and layout to this rank's mesh."""


class Meshes:
    """The meshes of one stage: those of examples, of `get_mesh`, and of the parameters."""

    def __init__(self, get_mesh: GetMesh | None, examples: Iterable[Tensor]) -> None:
        if get_mesh is not None and not callable(get_mesh):
            raise StageError(
                f"get_mesh is {get_mesh!r}. Expected a function from the names of a mesh's "
                "dimensions and its layout to this rank's mesh, such as "
                "lambda names, layout: mesh[names]."
            )
        self._get_mesh = get_mesh
        self._of_examples = set(meshes_of(examples))
        self._given: dict[tuple[Any, ...], DeviceMesh] = {}
        self._found: dict[tuple[Any, ...], DeviceMesh] = {}

    def forget(self) -> None:
        """Look at the parameters again: the module may have changed."""
        self._found.clear()

    def find(self, spread: Spread, module: nn.Module, place: str) -> DeviceMesh:
        """Return this rank's mesh for a DTensor from another rank, or raise an error at `place`."""
        key = spread.dim_names, spread.sizes, spread.layout, spread.coordinate
        for known in (self._given, self._found):
            if key in known:
                return known[key]
        fitting = _fitting(spread, self._of_examples)
        source, keep = "input_args and output_args", self._found
        if len(fitting) != 1 and self._get_mesh is not None:
            fitting = [self._ask(spread, place)]
            source, keep = "get_mesh", self._given
        elif len(fitting) != 1:
            fitting = _fitting(spread, meshes_of(chain(module.parameters(), module.buffers())))
            source = "the module's parameters"
        if len(fitting) != 1:
            name = f"{_index(spread)}" if spread.dim_names else ""
            raise StageError(
                f"{place} is {spread}, but {source} are on {len(fitting) or 'no'} such meshes. "
                "Expected exactly one mesh of this rank with these dimensions. Give the stage "
                f"get_mesh=lambda names, layout: mesh{name}."
            )
        (mesh,) = fitting
        if (own := coordinate_on(mesh)) != spread.coordinate:
            raise StageError(
                f"{place} is {spread}, from a rank at {spread.coordinate} of its mesh, but this "
                f"rank is at {own} of its own ({source}), so it would take another rank's part. "
                "Expected the same place: let pipeline groups join ranks with the same place."
            )
        keep[key] = mesh
        return mesh

    def _ask(self, spread: Spread, place: str) -> DeviceMesh:
        assert self._get_mesh is not None
        mesh = self._get_mesh(spread.dim_names, spread.layout)
        if not isinstance(mesh, DeviceMesh) or not fits(mesh, spread):
            raise StageError(
                f"{place} is {spread}, but get_mesh returned {mesh!r} for it. Expected this rank's "
                f"DeviceMesh with {dims_in_words(spread)}."
            )
        return mesh


def fits(mesh: DeviceMesh, spread: Spread) -> bool:
    """Return whether a mesh has the dimensions of a DTensor's mesh."""
    return dims_of(mesh) == (spread.dim_names, spread.sizes)


def meshes_of(tensors: Iterable[Tensor]) -> Iterator[DeviceMesh]:
    """Yield the meshes of those tensors that are DTensors."""
    for tensor in tensors:
        if is_dtensor(tensor):
            yield tensor.device_mesh  # type: ignore[attr-defined]  # a DTensor has one


def _fitting(spread: Spread, meshes: Iterable[DeviceMesh]) -> list[DeviceMesh]:
    """Return those of the meshes, or parts of them, that have the dimensions of a DTensor's."""
    found = set()
    wanted = spread.dim_names
    for mesh in set(meshes):
        names, _ = dims_of(mesh)
        if wanted and len(wanted) < len(names) and wanted == tuple(n for n in names if n in wanted):
            mesh = mesh[wanted]
        if fits(mesh, spread):
            found.add(mesh)
    return list(found)


def _index(spread: Spread) -> str:
    return "[" + ", ".join(f'"{name}"' for name in spread.dim_names) + "]"

"""Clip gradients by their norm over all stages, counting every parameter once.

    rank    norms of local gradients [1] ──▶ of a parameter's shards [2] ──┐
    others                                                                 ├─[3]─▶ total ─[4]─▶ clip
                                                                           ┘
Norms compose: the norm of the norms of the parts is the norm of the whole. Ranks exchange norms and
combine them in the same order, so the total is equal on all ranks to the last bit.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import nan
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm import AbstractComm, check_agreement
from penstock.comm.collective_results import waited
from penstock.comm.decisions import decide
from penstock.comm.pipelines_together import Peers
from penstock.comm.timed_collectives import add_up_, all_gather
from penstock.errors import GradientError
from penstock.ir import StageId
from penstock.stage import PipelineStage
from penstock.torch_private import foreach_mul_, foreach_norm, is_dtensor

_WHAT = "the norm of the gradients of all stages"
_EXPECTED = (
    "all of them, which hold the same parameters, to call clip_grad_norm_ after the same step"
)
_SUMS = ("sum", "avg")
"""The reductions whose parts may be scaled one by one."""
_HALVES = (torch.float16, torch.bfloat16)

Holders: TypeAlias = tuple[tuple[dist.ProcessGroup, bool], ...]
"""The ranks that hold a gradient, by dimension of its mesh; True where each has another shard."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """The arguments of `clip_grad_norm_`, checked."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    foreach: bool

    @classmethod
    def of(
        cls, max_norm: Any, norm_type: Any, error_if_nonfinite: bool, foreach: bool | None
    ) -> "Clipping":
        """Check the arguments; the devices that a pipeline runs on all have foreach operations."""
        limit, order = _number(max_norm), _number(norm_type)
        if not limit >= 0:
            raise GradientError(
                f"max_norm is {max_norm!r}. Expected a number, at least 0; with float('inf') the "
                "norm is computed, and nothing is clipped."
            )
        if not order > 0:
            raise GradientError(
                f"norm_type is {norm_type!r}. Expected a number above 0, such as 2.0, 1.0 or "
                "float('inf')."
            )
        return cls(limit, order, bool(error_if_nonfinite), foreach is None or bool(foreach))


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's contribution to the norm, and the arguments that it was given."""

    named: dict[str, Any]
    """The arguments that all ranks must be given alike."""
    own: float
    """The norm of the gradients that no other rank of the pipeline holds."""
    tied: dict[str, float]
    """The norm of each tied parameter's gradient, by the name that its copies share."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm of all gradients, and what this rank needs to clip its own."""

    total: Tensor
    clipping: Clipping
    named: list[dict[str, Any]]
    """The arguments that each rank was given."""
    locals: list[Tensor]

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scale the gradients of this rank, and return the norm.

        Raise an error if ranks were given different arguments, or if the norm is not finite and
        that is an error; all ranks raise it, and their gradients stay as they are.
        """
        check_agreement(self.named)
        if self.clipping.error_if_nonfinite and not self.total.isfinite():
            raise GradientError(
                f"the norm of order {self.clipping.norm_type:g} over the gradients of all ranks is "
                f"{self.total.item()}, so they cannot be clipped. Find the gradient that is not "
                "finite, or leave out error_if_nonfinite to scale by that norm anyway."
            )
        factor = (self.clipping.max_norm / (self.total + 1e-6)).clamp(max=1.0)  # [4]
        for (device, _), tensors in _alike(self.locals).items():
            there = factor.to(device)
            if self.clipping.foreach:
                foreach_mul_(tensors, there)
            else:
                for tensor in tensors:
                    tensor.mul_(there)
        return self.total


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a parameter's gradient that this rank has."""

    name: str | None
    """The name of a tied parameter."""
    holders: Holders
    local: Tensor | None
    """The memory of the gradient, to be scaled; None if there is no gradient."""
    measured: Tensor | None
    """The same, added up if its values are partial sums."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a DTensor, which is the same on all ranks of its mesh."""

    placements: tuple[Any, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.placements))})"


@dataclass(frozen=True, slots=True, eq=False)
class _Grad:
    """A parameter's gradient on this rank, before anything is known of other ranks."""

    name: str | None
    """The name of a tied parameter."""
    place: str
    shape: torch.Size
    value: Any
    """A tensor, a DTensor or None."""
    mesh: Any
    """The mesh of a DTensor, or None."""

    @property
    def form(self) -> _Form | None:
        if self.value is None:
            return None
        return _Form(tuple(self.value.placements), self.value.dtype)


@torch.no_grad()
def measure_norm(
    stages: Mapping[StageId, PipelineStage],
    comm: AbstractComm,
    device: torch.device,
    clipping: Clipping,
    timeout_s: float,
) -> Norm:
    """Return the norm of the gradients of all stages. All ranks of the pipeline must call it.

    Where parameters are DTensors, so must all ranks of their meshes.
    """
    parts = list(_parts_of(stages, device, timeout_s))
    own = [0.0]
    tied: dict[str, float] = {}
    for holders in dict.fromkeys(part.holders for part in parts):
        rows: dict[str | None, list[Tensor]] = {None: []}
        for part in parts:
            if part.holders == holders and part.name not in tied:
                row = rows.setdefault(part.name, [])
                # A name has one row of one part: its copies on this rank have the same gradient.
                if part.measured is not None and (part.name is None or not row):
                    row.append(part.measured)
        norms = torch.stack([_norm_of(row, clipping, device) for row in rows.values()])  # [1]
        for group, is_sharded in holders:  # [2]
            norms = _over_mesh(norms, group, is_sharded, clipping.norm_type, timeout_s)
        alone, *others = norms.tolist()
        own.append(alone)
        tied |= zip(list(rows)[1:], others, strict=True)  # type: ignore[arg-type]  # None is first
    dtype = _widest(part.measured.dtype for part in parts if part.measured is not None)
    named = {
        "max_norm": clipping.max_norm,
        "norm_type": clipping.norm_type,
        "error_if_nonfinite": clipping.error_if_nonfinite,
    }
    share = _Share(named, _combine(_row(own), clipping.norm_type).item(), tied, dtype)
    shares: list[_Share] = decide(comm, device, share, list, _WHAT)  # [3]
    # All copies of a tied parameter have the same gradient: that of the first rank counts.
    once = {name: norm for share in reversed(shares) for name, norm in share.tied.items()}
    norms_of_all = [*(share.own for share in shares), *(once[name] for name in sorted(once))]
    total = _combine(_row(norms_of_all), clipping.norm_type)
    return Norm(
        total.to(device, _widest(share.dtype for share in shares)),
        clipping,
        [share.named for share in shares],
        [part.local for part in parts if part.local is not None],
    )


def _grads_of(stages: Mapping[StageId, PipelineStage]) -> Iterator[_Grad]:
    """Yield each parameter of this rank, once; raise an error for those without norm."""
    names: dict[int, str] = {}
    for stage in stages.values():
        names |= {id(weight): name for _, name, weight in stage.tied_parameters()}
    seen = set()
    for index in sorted(stages):
        stage = stages[index]
        place = f"stage {index} on rank {stage.group_rank}"
        if stage.has_unreduced_grads:
            raise GradientError(
                f"{place} has gradients that are not reduced yet, because of "
                "finalize_gradients=False, set_requires_gradient_sync(False) or "
                "set_requires_all_reduce(False), so their norm is not known. Clip after a step "
                "that reduces them."
            )
        for param_name, weight in stage.submod.named_parameters():
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            grad = waited(weight.grad)
            if grad is not None and grad.layout is not torch.strided:
                raise GradientError(
                    f"{place}, {param_name}: the gradient has layout {grad.layout}, whose norm "
                    "torch does not compute. Expected a dense one: make the embedding with "
                    "sparse=False."
                )
            held: Any = weight if grad is None else grad
            mesh = held.device_mesh if is_dtensor(held) else None
            yield _Grad(names.get(id(weight)), f"{place}, {param_name}", held.shape, grad, mesh)


def _parts_of(
    stages: Mapping[StageId, PipelineStage], device: torch.device, timeout_s: float
) -> Iterator[_Part]:
    """Yield the parts of gradients that this rank has, or that another rank of the mesh has."""
    grads = list(_grads_of(stages))
    forms: dict[int, _Form | None] = {}
    for mesh in dict.fromkeys(grad.mesh for grad in grads if grad.mesh is not None):
        forms |= _agreed_forms([grad for grad in grads if grad.mesh == mesh], device, timeout_s)
    for grad in grads:
        if grad.mesh is None:
            yield _Part(grad.name, (), grad.value, grad.value)
        elif (form := forms[id(grad)]) is not None:
            yield _part_on_mesh(grad, form, timeout_s)


def _agreed_forms(
    grads: list[_Grad], device: torch.device, timeout_s: float
) -> dict[int, _Form | None]:
    """Return the form of each gradient on a mesh, by identity; None if no rank of it has one.

    A rank without a gradient learns here that others have one, and which collectives they join.
    """
    mesh = grads[0].mesh
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    own = tuple(mesh.get_coordinate()), [grad.form for grad in grads]
    what = "the placements of gradients in clip_grad_norm_"
    rows = dict(Peers.of(groups, device, timeout_s).gather(own, what))
    counts = [len(row) for row in rows.values()]
    if len(set(counts)) > 1:
        raise GradientError(
            f"{grads[0].place}: the ranks of its mesh have {', '.join(map(str, counts))} "
            "gradients on that mesh. Expected the same number on all: the gradients of one "
            "parameter must be DTensors on all ranks, or on none."
        )
    return {
        id(grad): _agreed_form(grad, {at: row[number] for at, row in rows.items()})
        for number, grad in enumerate(grads)
    }


def _agreed_form(grad: _Grad, forms: Mapping[tuple[int, ...], _Form | None]) -> _Form | None:
    """Return the one form among those of all ranks, by their coordinates on the mesh."""
    from torch.distributed.tensor import Partial  # Late: it takes a while to load.

    found = list(dict.fromkeys(form for form in forms.values() if form is not None))
    if not found:
        return None
    if len(found) > 1:
        raise GradientError(
            f"{grad.place}: the ranks of the mesh have gradients of different forms: "
            f"{'; '.join(map(str, found))}. Expected the same placements and dtype on all."
        )
    holders = {at for at, form in forms.items() if form is not None}
    for dim, kind in enumerate(found[0].placements):
        rows = {_without(at, dim) for at in holders}
        replicas = {at for at in forms if _without(at, dim) in rows}
        if kind.is_replicate() and replicas != holders:
            raise GradientError(
                f"{grad.place}: the gradient is replicated over dimension {dim} of its mesh, but "
                f"the ranks at {sorted(replicas - holders)} of the mesh have none. Expected one "
                "on all of them, or on none: use the parameter on all."
            )
        if kind.is_partial() and not (type(kind) is Partial and kind.reduce_op in _SUMS):
            raise GradientError(
                f"{grad.place}: the gradient has the placement {kind}, so scaling its parts does "
                "not scale it. Expected partial sums or averages: redistribute it before clipping."
            )
    return found[0]


def _without(coordinate: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*coordinate[:dim], *coordinate[dim + 1 :])


def _part_on_mesh(grad: _Grad, form: _Form, timeout_s: float) -> _Part:
    """Return this rank's part of a DTensor, after adding up the dimensions with partial sums."""
    from torch.distributed.tensor import Replicate, zeros  # Late: it takes a while to load.

    groups = [grad.mesh.get_group(dim) for dim in range(grad.mesh.ndim)]
    local: Tensor | None = None if grad.value is None else waited(grad.value.to_local())
    measured = local
    partial = {dim: kind for dim, kind in enumerate(form.placements) if kind.is_partial()}
    if partial:
        whole = [Replicate() if kind.is_partial() else kind for kind in form.placements]
        if local is None:
            none = zeros(grad.shape, dtype=form.dtype, device_mesh=grad.mesh, placements=whole)
            measured = none.to_local()
        else:
            measured = local.clone(memory_format=torch.contiguous_format)
        for dim, kind in partial.items():
            add_up_(measured, groups[dim], timeout_s, what="partial sums", expected=_EXPECTED)
            if kind.reduce_op == "avg":
                measured /= grad.mesh.size(dim)
    holders = tuple(
        # A partial sum is now the same on all ranks of the dimension.
        (group, not (kind.is_replicate() or kind.is_partial()))
        for group, kind in zip(groups, form.placements, strict=True)
    )
    return _Part(grad.name, holders, local, measured)


def _norm_of(tensors: list[Tensor], clipping: Clipping, device: torch.device) -> Tensor:
    """Return the norm of some tensors together; halves are added up in 32 bits."""
    norms: list[Tensor] = []
    for (_, dtype), alike in _alike(tensors).items():
        wide = torch.float32 if dtype in _HALVES else None
        if clipping.foreach:
            norms += foreach_norm(alike, clipping.norm_type, dtype=wide)
        else:
            norms += [
                torch.linalg.vector_norm(tensor, clipping.norm_type, dtype=wide) for tensor in alike
            ]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return _combine(torch.stack([zero, *(norm.to(zero) for norm in norms)]), clipping.norm_type)


def _over_mesh(
    norms: Tensor, group: dist.ProcessGroup, is_sharded: bool, norm_type: float, timeout_s: float
) -> Tensor:
    """Return the norms over the ranks of a mesh's dimension: of all shards, or of one replica."""
    parts = all_gather(norms, group, timeout_s, what="the norms", expected=_EXPECTED)
    return _combine(torch.stack(parts), norm_type) if is_sharded else parts[0]


def _combine(norms: Tensor, norm_type: float) -> Tensor:
    """Return the norm of norms over the first dimension; it is NaN if one of them is."""
    combined: Tensor = torch.linalg.vector_norm(norms, norm_type, dim=0)
    return combined


def _row(norms: list[float]) -> Tensor:
    return torch.tensor(norms, dtype=torch.float64)


def _alike(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return tensors by device and dtype, without those that are empty, as some shards are."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype that holds a norm of gradients of these dtypes."""
    return reduce(torch.promote_types, (dtype.to_real() for dtype in dtypes), torch.float32)


def _number(value: Any) -> float:
    """Return a value as a number; NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return nan

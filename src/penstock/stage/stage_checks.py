"""Checks of the arguments that a stage is made with."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from penstock.comm import DryGroup, LocalGroup
from penstock.errors import StageError
from penstock.ir import StageId
from penstock.torch_private import original_module

Group: TypeAlias = dist.ProcessGroup | LocalGroup | None
"""The ranks of a pipeline: processes, threads of one process, or all processes."""

StageGroup: TypeAlias = Group | DryGroup
"""The ranks of a stage's pipeline, of which there may be only one."""

GroupOrMesh: TypeAlias = StageGroup | DeviceMesh
"""The ranks of a pipeline as users give them: a mesh must have one dimension."""


def as_process_group(name: str, group: Any, dim: str) -> dist.ProcessGroup:
    """Return a process group, given itself or as a mesh with one dimension.

    Raise an error that shows how to select the dimension `dim` of a mesh.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, DeviceMesh):
        raise StageError(
            f"{name} is a {type(group).__name__}. Expected a torch.distributed process group or a "
            f'DeviceMesh with one dimension, such as mesh["{dim}"].'
        )
    if group.ndim != 1:
        dims = ", ".join(map(repr, group.mesh_dim_names or ())) or "without names"
        raise StageError(
            f"{name} is a DeviceMesh with {group.ndim} dimensions ({dims}). Expected one "
            f'dimension: select it by its name, such as mesh["{dim}"].'
        )
    if group.get_coordinate() is None:
        raise StageError(
            f"{name} is a DeviceMesh with ranks {group.mesh.tolist()}, and this process is rank "
            f'{dist.get_rank()}. Expected a mesh with this process: select it with mesh["{dim}"] '
            "from the mesh of all ranks."
        )
    return group.get_group()


def as_group(group: GroupOrMesh) -> StageGroup:
    """Return a stage's group, given as that or as a mesh."""
    if group is None or isinstance(group, LocalGroup | DryGroup):
        return group
    return as_process_group("group", group, "pp")


def place_in(group: StageGroup) -> tuple[int, int]:
    """Return this rank's number in the group, and the number of ranks."""
    if isinstance(group, LocalGroup | DryGroup):
        return group.rank, group.num_ranks
    if not (dist.is_available() and dist.is_initialized()):
        raise StageError(
            "The stage has no group, and torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group() first, or run the ranks in this process "
            "with penstock.local_ranks() and give the stage its group."
        )
    return dist.get_rank(group), dist.get_world_size(group)


def ranks_of(group: StageGroup) -> list[int]:
    """Return the ranks of a pipeline, numbered among all processes; none if they are not those."""
    if isinstance(group, LocalGroup | DryGroup):
        return []
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def check_place(stage_index: StageId, num_stages: int) -> None:
    for name, value in (("stage_index", stage_index), ("num_stages", num_stages)):
        if not isinstance(value, int):
            raise StageError(f"{name} is {value!r}. Expected a whole number.")
    if not 0 <= stage_index < num_stages:
        raise StageError(
            f"stage_index is {stage_index}, but num_stages is {num_stages}. "
            f"Stages are numbered from 0 to num_stages - 1."
        )


def check_tied(
    stage_index: StageId, submodule: nn.Module, tied: Mapping[str, str]
) -> dict[str, str]:
    if not isinstance(tied, Mapping) or not all(isinstance(name, str) for name in tied.values()):
        raise StageError(
            f"stage {stage_index}: tied is {tied!r}. Expected a mapping from names of parameters "
            'to the names that they share with other stages, such as {"head.weight": "embedding"}.'
        )
    known = [name for name, _ in unwrapped(submodule).named_parameters(remove_duplicate=False)]
    for name in tied:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.3) or known[:3]
            raise StageError(
                f"stage {stage_index}: tied names {name!r}, which is not a parameter of the "
                f"module. Expected names as in named_parameters(): the closest are {close}."
            )
    return dict(tied)


def check_skip_counts(
    name: str, stage_index: StageId, skips: Mapping[StageId, int] | None, others: range
) -> dict[StageId, int]:
    if skips is None:
        return {}
    if not isinstance(skips, Mapping):
        raise StageError(
            f"stage {stage_index}: {name} is {skips!r}. Expected a mapping from stages to the "
            "number of values that go there or come from there, such as {3: 1}."
        )
    for stage, count in skips.items():
        if stage not in others or not isinstance(count, int) or count < 1:
            expected = f"from {others[0]} to {others[-1]}" if others else "it has none"
            raise StageError(
                f"stage {stage_index}: {name} is {dict(skips)}. Expected numbers of values, at "
                f"least 1, for stages that are not neighbours: {expected}."
            )
    return dict(sorted(skips.items()))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that was wrapped or compiled, whose parameters have their own names."""
    is_ddp = isinstance(module, DistributedDataParallel)
    inner = module.get_submodule("module") if is_ddp else original_module(module)
    return module if inner is None else unwrapped(inner)

"""Checks of what a stage is made with."""

import difflib
from collections.abc import Mapping
from typing import TypeAlias

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.comm import LocalGroup
from penstock.errors import StageError
from penstock.ir import StageId
from penstock.torch_private import original_module

Group: TypeAlias = dist.ProcessGroup | LocalGroup | None
"""The ranks of a pipeline: processes, threads of one process, or all processes."""


def place_in(group: Group) -> tuple[int, int]:
    """The rank in the group, and the number of its ranks."""
    if isinstance(group, LocalGroup):
        return group.rank, group.num_ranks
    if not (dist.is_available() and dist.is_initialized()):
        raise StageError(
            "The stage has no group, and torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group() first, or run the ranks in this process "
            "with penstock.local_ranks() and give the stage its group."
        )
    return dist.get_rank(group), dist.get_world_size(group)


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
                f"stage {stage_index}: tied names {name!r}, which is no parameter of the module. "
                f"Expected names as in named_parameters(): the closest are {close}."
            )
    return dict(tied)


def check_skip_counts(
    name: str, stage_index: StageId, skips: Mapping[StageId, int] | None, others: range
) -> dict[StageId, int]:
    if skips is None:
        return {}
    if not isinstance(skips, Mapping):
        raise StageError(
            f"stage {stage_index}: {name} is {skips!r}. Expected a mapping from stages to how many "
            "values go there or come from there, such as {3: 1}."
        )
    for stage, count in skips.items():
        if stage not in others or not isinstance(count, int) or count < 1:
            expected = f"from {others[0]} to {others[-1]}" if others else "none, as it has none"
            raise StageError(
                f"stage {stage_index}: {name} is {dict(skips)}. Expected how many values, by "
                f"stages that are no neighbours: {expected}."
            )
    return dict(sorted(skips.items()))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that was wrapped or compiled, which knows parameters by their own names."""
    is_ddp = isinstance(module, DistributedDataParallel)
    inner = module.get_submodule("module") if is_ddp else original_module(module)
    return module if inner is None else unwrapped(inner)

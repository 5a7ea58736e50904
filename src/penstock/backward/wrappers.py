"""Wrappers that change how the gradients of a module come about.

What wraps a module is looked up by name among the modules that Python has loaded: loading
torch's compiler or its sharding takes seconds, and where they are not loaded nothing is wrapped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from penstock.torch_private import (
    FULLY_SHARDED_NODE,
    compiled_call,
    is_instance_if_loaded,
    is_optimized_module,
    is_replicated_by_ddp,
    is_replicated_by_fsdp,
    own_parameters,
)


def is_compiled(module: nn.Module) -> bool:
    """Return whether this module itself was compiled; modules inside it are not checked."""
    return is_optimized_module(module) or compiled_call(module) is not None


def outline(root: nn.Module) -> list[tuple[Any, ...]]:
    """Return what an engine depends on: modules, their classes, and which are compiled.

    Two outlines are equal if nothing was added, replaced, wrapped or compiled in between. This
    runs in every step, so it takes about a microsecond for each module.
    """
    return [
        (
            module,
            type(module),
            type(module).forward,
            compiled_call(module),
            bool(own_parameters(module)),
        )
        for module in root.modules()
    ]


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A wrapper that reduces or shards a module's gradients."""

    name: str
    takes_full_backwards: bool
    """Whether gradients are right as long as backwards are not split."""


_SHARDED = Wrapper("fully_shard (FSDP2)", takes_full_backwards=True)
_REPLICATED = Wrapper("replicate (built on FSDP2)", takes_full_backwards=True)
_FLAT = Wrapper("FullyShardedDataParallel (FSDP1)", takes_full_backwards=False)
_REDUCED = Wrapper("replicate (built on DistributedDataParallel)", takes_full_backwards=False)
_INNER = Wrapper("DistributedDataParallel on a part of the stage", takes_full_backwards=False)


def find_wrapper(root: nn.Module) -> tuple[str, Wrapper] | None:
    """Return the worst wrapper that cannot be worked with as it is, and the module it is on.

    DistributedDataParallel around the root is none of them: the runtime tells it when to reduce.
    """
    found = [
        (name, wrapper)
        for name, module in root.named_modules()
        if (wrapper := _wrapper_of(module, is_root=module is root)) is not None
    ]
    return min(found, key=lambda each: each[1].takes_full_backwards, default=None)


def _wrapper_of(module: nn.Module, *, is_root: bool) -> Wrapper | None:
    if isinstance(module, DistributedDataParallel):
        return None if is_root else _INNER
    if is_replicated_by_fsdp(module):
        return _REPLICATED
    if is_instance_if_loaded(module, "torch.distributed.fsdp:FSDPModule"):
        return _SHARDED
    if is_instance_if_loaded(module, "torch.distributed.fsdp:FullyShardedDataParallel"):
        return _FLAT
    if is_replicated_by_ddp(module):
        return _REDUCED
    return None


def is_sharded_graph(roots: Sequence[Tensor]) -> bool:
    """Return whether a graph goes through modules that fully_shard gathered for their forward.

    Its leaves are then gathered parameters, which nobody reduces or keeps after the backward.
    """
    if "torch.distributed.fsdp" not in sys.modules or not dist.is_initialized():
        return False  # Without a walk over the graph.
    stack: list[Node | None] = [root.grad_fn for root in roots]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == FULLY_SHARDED_NODE:
            return True
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
    return False

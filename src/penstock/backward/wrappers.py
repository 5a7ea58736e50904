"""Wrappers that change how a module's gradients are computed.

A wrapper's class is looked up by name among the modules that Python has loaded. Loading torch's
compiler or its sharding takes seconds, and if they are not loaded, nothing is wrapped.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from penstock.torch_private import (
    COMPILED_NODE,
    FULLY_SHARDED_NODE,
    compiled_call,
    is_compiler_loaded,
    is_instance_if_loaded,
    is_optimized_module,
    is_replicated_by_ddp,
    is_sharded_module,
    own_parameters,
    sequence_number,
)


def is_compiled(module: nn.Module) -> bool:
    """Return whether this module itself was compiled; modules inside it are not checked."""
    return is_optimized_module(module) or compiled_call(module) is not None


def outline(root: nn.Module) -> list[tuple[Any, ...]]:
    """Return everything an engine depends on: modules, their classes, and which are compiled.

    Two outlines are equal if nothing was added, replaced, wrapped or compiled in between. This
    runs in every step, and takes only about a microsecond for each module.
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


_FLAT = "FullyShardedDataParallel (FSDP1)"
_REDUCED = "replicate (built on DistributedDataParallel)"
_INNER = "DistributedDataParallel on a part of the stage"


def find_wrapper(root: nn.Module) -> tuple[str, str] | None:
    """Return the name of the first module with a wrapper that no pipeline works with, and its kind.

    DistributedDataParallel around the root is not one of them, nor are `fully_shard` and the
    `replicate` that is built on it: the runtime says when they reduce.
    """
    for name, module in root.named_modules():
        if isinstance(module, DistributedDataParallel):
            if module is not root:
                return name, _INNER
        elif is_instance_if_loaded(module, "torch.distributed.fsdp:FullyShardedDataParallel"):
            return name, _FLAT
        elif not is_sharded_module(module) and is_replicated_by_ddp(module):
            return name, _REDUCED
    return None


def is_sharded_graph(roots: Sequence[Tensor]) -> bool:
    """Return whether a graph goes through modules that fully_shard gathered for their forward.

    Its leaves are then gathered parameters, which are not reduced or kept after the backward.
    """
    if "torch.distributed.fsdp" not in sys.modules or not dist.is_initialized():
        return False  # This avoids a search of the graph.
    return find_node(roots, FULLY_SHARDED_NODE) is not None


def is_compiled_graph(roots: Sequence[Tensor]) -> bool:
    """Return whether a graph goes through code that torch.compile has compiled."""
    return is_compiler_loaded() and find_node(roots, COMPILED_NODE) is not None


def find_node(roots: Sequence[Tensor], kind: str, made_since: int = 0) -> Node | None:
    """Return a node of a class in the graph of `roots`; None if there is none.

    `made_since` is a sequence number: older nodes, and what they lead to, are left out.
    """
    stack: list[Node | None] = [root.grad_fn for root in roots]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen or sequence_number(node) < made_since:
            continue
        if type(node).__name__ == kind:
            return node
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
    return None

"""Find out whether the graph of a traced model holds for other arguments too.

A graph has the sizes of its example in it wherever the model reads them: in a view, or as a number
to divide by. So it holds for other sizes if a trace with them gives the same graph.
"""

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.cutting.marks import MARK
from penstock.cutting.tracing import trace


def describe_graph(graph_module: fx.GraphModule) -> list[str]:
    """Return the operations of a graph and of those within it, with all their constants."""
    lines = []
    state = {id(t) for t in (*graph_module.parameters(), *graph_module.buffers())}
    inner = (module for module in graph_module.modules() if isinstance(module, fx.GraphModule))
    for module in inner:
        for node in module.graph.nodes:
            if node.target is MARK:
                continue
            line = f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}"
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(module)
                if isinstance(value, Tensor) and id(value) not in state and not value.is_meta:
                    line = f"{line} {value.dtype} {list(value.shape)} {_digest(value)}"
            lines.append(line)
    return lines


def _digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def gives_same_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], described: list[str]
) -> bool:
    """Return whether a trace with these arguments gives the graph with this description."""
    return described == describe_graph(trace(model, args, kwargs, {}).graph_module)


@contextmanager
def in_modes(model: nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    """Let each module be in the mode of its name, training or not, while the block runs."""
    before = [(module, module.training) for module in model.modules()]
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode

"""Linear layers and convolutions of a traced stage, turned back into modules.

In a graph they are operations on parameters. The split backward knows the modules, and defers
their weight gradients at less cost than those of operations that it finds in the autograd graph.
"""

import operator
from collections.abc import Mapping

import torch
from torch import fx, nn
from torch.fx import Node

from penstock.torch_private import share_contents

_aten = torch.ops.aten
_OPERATIONS: dict[type[nn.Module], object] = {
    nn.Linear: _aten.linear.default,
    nn.Conv1d: _aten.conv1d.default,
    nn.Conv2d: _aten.conv2d.default,
    nn.Conv3d: _aten.conv3d.default,
}
_PARAMETERS = ("weight", "bias")


def module_of(
    node: Node, graph_module: fx.GraphModule, modules: Mapping[str, nn.Module]
) -> str | None:
    """Return the name of the linear layer or convolution whose whole forward this is, or None."""
    stack = node.meta.get("nn_module_stack")
    name = str(list(stack.values())[-1][0]) if stack else ""
    module = modules.get(name) if name else None  # A graph cannot call the model itself.
    if module is None or _OPERATIONS.get(type(module)) is not node.target:
        return None
    if "forward" in vars(module):
        return None  # Someone replaced its forward.
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return None  # Its forward pads first, in another operation.
    parameters = [*node.args[1:3], None, None][:2]
    for own, found in zip(_PARAMETERS, parameters, strict=True):
        value = None
        if isinstance(found, Node) and found.op == "get_attr":
            value = operator.attrgetter(str(found.target))(graph_module)
        elif found is not None:
            return None
        if value is not getattr(module, own):
            return None
    return name


def restore(stage: nn.Module, name: str, original: nn.Module) -> None:
    """Put a module like the original, without its hooks, where a stage has its parameters."""
    parent_name, _, last = name.rpartition(".")
    parent = stage.get_submodule(parent_name)
    held = parent.get_submodule(last)
    module = type(original).__new__(type(original))
    nn.Module.__init__(module)
    for key, value in vars(original).items():
        vars(module).setdefault(key, value)
    share_contents(module, held)
    if original.bias is None:
        module.register_parameter("bias", None)
    setattr(parent, last, module)

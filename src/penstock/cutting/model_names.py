"""The names of a model's parameters and buffers, which its stages keep."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from penstock.ir import StageId
from penstock.torch_private import non_persistent_buffers, own_buffers, own_modules, own_parameters


class Names:
    """All names of each parameter and buffer of a model, in the model's order."""

    def __init__(self, model: nn.Module) -> None:
        self._names: defaultdict[Tensor, list[str]] = defaultdict(list)
        self._persistent: dict[str, bool] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
                if tensor is not None:
                    full = f"{prefix}.{name}" if prefix else name
                    self._names[tensor].append(full)
                    self._persistent[full] = name not in non_persistent_buffers(module)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._names)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._names

    def of(self, tensor: Tensor) -> list[str]:
        return self._names[tensor]

    def add_unused(self, holders: dict[Tensor, list[StageId]]) -> None:
        """Give each tensor that no stage holds to the stage that holds the nearest name."""
        held = [
            (name, stage)
            for tensor, stages in holders.items()
            for name in self.of(tensor)
            for stage in stages[:1]
        ]
        for tensor in self._names:
            if tensor not in holders:
                name = self.of(tensor)[0]
                nearest = max(held, key=lambda known: _shared_modules(name, known[0]), default=None)
                holders[tensor] = [0 if nearest is None else nearest[1]]

    def install(
        self,
        module: nn.Module,
        tensor: Tensor,
        names: Sequence[str],
        *,
        is_first: bool,
        saves_all: bool = False,
    ) -> Tensor:
        """Set a tensor under some of its names: itself in its first holder, a copy in others.

        If `saves_all`, buffers are in the state dict even if they are not in the model's, unless
        they have no values.
        """
        own = tensor
        if isinstance(tensor, nn.Parameter) and not is_first:
            own = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
        for name in names:
            is_persistent = self._persistent[name] or (saves_all and not tensor.is_meta)
            install(module, name, own, is_persistent=is_persistent)
        return own


def install(
    module: nn.Module,
    name: str,
    value: Any,
    *,
    is_persistent: bool = True,
    is_constant: bool = False,
) -> None:
    """Set an attribute with a dotted name; create the modules on the way that are missing."""
    *path, last = name.split(".")
    for part in path:
        if part not in own_modules(module):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    if is_tensor and not (value.is_meta and is_constant):
        module.register_buffer(last, value, persistent=is_persistent)
    else:
        # Also for a constant without values: to_empty() would give a buffer arbitrary ones.
        setattr(module, last, value)


def _shared_modules(first: str, second: str) -> int:
    """Return the number of modules that two names have in common."""
    pairs = zip(first.split(".")[:-1], second.split(".")[:-1], strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

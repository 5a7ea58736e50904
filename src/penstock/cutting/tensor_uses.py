"""Where a forward uses the parameters and buffers of its model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.torch_private import TorchDispatchMode, pytree, schema_of


@dataclass(slots=True)
class Uses:
    """Where a parameter or a buffer is used: during which calls of units, and in between."""

    calls: set[int] = field(default_factory=set)
    is_outside: bool = False
    is_written: bool = False


class NotingUses(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """A mode that notes which parameters and buffers operations use."""

    def __init__(self, known: set[Tensor], place: Callable[[], tuple[int, bool]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.found: dict[Tensor, Uses] = {}
        self._known = {id(tensor): tensor for tensor in known}
        self._place = place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) in self._known:
                own = self.found.setdefault(leaf, Uses())
                position, is_inside = self._place()
                own.calls.add(position)
                own.is_outside |= not is_inside
                own.is_written |= _is_written(func, args, leaf)
        return func(*args, **kwargs)


def _is_written(func: Any, args: tuple[Any, ...], tensor: Tensor) -> bool:
    arguments = zip(schema_of(func).arguments, args, strict=False)
    return any(
        value is tensor and each.alias_info is not None and each.alias_info.is_write
        for each, value in arguments
    )

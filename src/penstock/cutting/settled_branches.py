"""Branches on random numbers that can go only one way.

Models that may drop layers at random draw a number for each: `if torch.rand([]) < layerdrop`. A
branch on a tensor cannot be traced. But a number in [0, 1) is never below 0, so if layers are
never dropped, which way the branch goes is certain.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BELOW = (Tensor.__lt__, Tensor.lt, torch.lt)
_NOT_BELOW = (Tensor.__ge__, Tensor.ge, torch.ge)


class SettledBranches(TorchFunctionMode):
    """A mode that answers whether a number drawn from [0, 1) is below one that is at most 0.

    All other comparisons are left to torch, so other branches on random numbers are refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[Any] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _BELOW and self._is_settled(args):
            return False
        if func in _NOT_BELOW and self._is_settled(args):
            return True
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.dim() == 0:
            self._drawn.append(result)
        return result

    def _is_settled(self, args: tuple[Any, ...]) -> bool:
        drawn, bound = args if len(args) == 2 else (None, None)
        is_number = isinstance(bound, int | float) and bound <= 0
        return is_number and any(drawn is known for known in self._drawn)

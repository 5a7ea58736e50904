"""Random numbers that belong to other stages.

All stages run the code between layers, and each would draw its own random numbers there. So in a
part of the forward that belongs to another stage, what is drawn is hollow: if a layer needs it, it
is sent by the stage that the part belongs to. A single number, as for dropping a layer, is drawn.

A tensor that is drawn in place becomes hollow itself, for all who have it. Others that share its
memory do not, so what uses one of them is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.cutting.hollow import Hollow, Whereabouts
from penstock.errors import StageError
from penstock.torch_private import pytree

_DRAWING = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal", "gumbel_softmax", "rrelu", "poisson", "binomial"),
    *("bernoulli_", "uniform_", "normal_", "exponential_", "random_", "geometric_"),
    *("log_normal_", "cauchy_", "rrelu_"),
    "kaiming_uniform_",  # Other functions of torch.nn.init call those above.
}
_DROPPING = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
}


class ForeignDraws(TorchFunctionMode):
    """A mode in which random tensors are hollow while `is_foreign()`."""

    def __init__(
        self, is_foreign: Callable[[], bool], whereabouts: Whereabouts, *, is_trial: bool
    ) -> None:
        """Begin; in a trial, dropout counts in eval mode too, as training may follow."""
        super().__init__()
        self._is_trial = is_trial
        self.has_found = False
        """Whether there was anything to draw in a part of another stage."""
        self._is_foreign = is_foreign
        self._whereabouts = whereabouts
        self._filled: dict[int, torch.UntypedStorage] = {}
        """The memory that was drawn into, by its address."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if self._filled and func.__name__ != "__get__":  # Not an attribute, such as its shape.
            self.check_unused((args, given))
        result = func(*args, **given)
        if not self._draws(func.__name__, args, given) or not self._is_foreign():
            return result
        if not isinstance(result, Tensor) or isinstance(result, Hollow) or result.numel() < 2:
            return result
        self.has_found = True
        hollow = Hollow.like(result, "a random number", self._whereabouts)
        if not _is_in_place(func.__name__, args, given):
            return hollow
        memory = result.untyped_storage()
        self._filled[memory.data_ptr()] = memory
        torch.utils.swap_tensors(result, hollow)  # type: ignore[no-untyped-call]  # as torch has it
        return result

    def check_unused(self, tree: Any) -> None:
        """Raise an error if a tensor has random numbers of this stage in place of another's."""
        for leaf in pytree.tree_leaves(tree):
            is_real = isinstance(leaf, Tensor) and not isinstance(leaf, Hollow)
            if is_real and leaf.untyped_storage().data_ptr() in self._filled:
                raise StageError(
                    "code between layers draws random numbers into a part of a tensor, which is "
                    "used later, but those that count are drawn by another stage. Draw into the "
                    "whole tensor, or make a new one with torch.rand(…) or its like, or let the "
                    "code be part of a layer."
                )

    def _draws(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
        """Return whether a function draws random numbers."""
        if name not in _DROPPING:
            return name in _DRAWING
        rate = given.get("p", args[1] if len(args) > 1 else 0.5)
        is_training = given.get("training", args[2] if len(args) > 2 else True)
        return rate > 0 and (self._is_trial or bool(is_training))


def _is_in_place(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Return whether a function that draws changes a tensor that it is given."""
    is_dropped = name in _DROPPING and len(args) > 3 and args[3]
    return name.endswith("_") or bool(given.get("inplace") or is_dropped) or "out" in given

"""Random numbers that belong to other stages.

All stages run the code between layers, and each would draw its own random numbers there. So in a
part of the forward that belongs to another stage, what is drawn is hollow: if a layer needs it, it
is sent by the stage that the part belongs to. A single number, as for dropping a layer, is drawn.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.cutting.hollow import Hollow, Whereabouts

_DRAWING = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal", "gumbel_softmax", "rrelu"),
    *("bernoulli_", "uniform_", "normal_", "exponential_"),
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

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        if not self._draws(func.__name__, args, given) or not self._is_foreign():
            return result
        if not isinstance(result, Tensor) or isinstance(result, Hollow) or result.numel() < 2:
            return result
        self.has_found = True
        return Hollow.like(result, "a random number", self._whereabouts)

    def _draws(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
        """Return whether a function draws random numbers."""
        if name not in _DROPPING:
            return name in _DRAWING
        rate = given.get("p", args[1] if len(args) > 1 else 0.5)
        is_training = given.get("training", args[2] if len(args) > 2 else True)
        return rate > 0 and (self._is_trial or bool(is_training))

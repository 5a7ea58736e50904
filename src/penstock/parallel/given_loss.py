"""The loss of a model: the caller's function, or the one that the model returns itself."""

from collections.abc import Mapping
from typing import Any, cast

from penstock.errors import StageError
from penstock.runtime.step_settings import LossFn


def loss_as_given(loss_fn: Any) -> LossFn | None:
    """Return the function that a pipeline computes losses with."""
    if isinstance(loss_fn, str) and loss_fn == "model":
        return own_loss
    if loss_fn is not None and not callable(loss_fn):
        raise StageError(
            f"loss_fn is {loss_fn!r}. Expected a function of the output and the target, 'model' "
            "for a model that returns its own loss, or None."
        )
    return cast(LossFn | None, loss_fn)


def own_loss(output: Any, target: Any) -> Any:
    """Return the loss that a model has computed."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise StageError(
            f"loss_fn is 'model', but the model returned a {type(output).__name__} without a loss. "
            "Give step() what the model computes it from, such as labels=…, or give parallelize() "
            "a loss_fn."
        )
    return loss

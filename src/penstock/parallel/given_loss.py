"""The loss of a model: the caller's function, or the one that the model returns itself."""

from typing import Any, cast

from penstock.errors import StageError
from penstock.runtime.own_loss import OwnLoss
from penstock.runtime.step_settings import LossFn


def loss_as_given(loss_fn: Any) -> LossFn | None:
    """Return the function that a pipeline computes losses with."""
    if isinstance(loss_fn, str) and loss_fn == "model":
        return OwnLoss()
    if loss_fn is not None and not callable(loss_fn):
        raise StageError(
            f"loss_fn is {loss_fn!r}. Expected a function of the output and the target, 'model' "
            "for a model that returns its own loss, or None."
        )
    return cast(LossFn | None, loss_fn)

"""A scale for float16 gradients that all ranks of a pipeline share."""

import math
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import GradientError, StageError

if TYPE_CHECKING:
    from penstock.parallel.parallel_model import ParallelModel


class GradScaler:
    """A loss scale like torch.amp.GradScaler's, with one decision for all ranks.

    Give it to `step`, so that gradients are multiplied by the scale, and let it step the optimizer:

        loss = pipe.step(x, target=y, scaler=scaler)
        scaler.unscale_()   # Only needed before clipping.
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    If a gradient on any rank is not finite, no rank steps, and `update` makes the scale smaller.
    The defaults are torch's.
    """

    def __init__(
        self,
        pipe: "ParallelModel",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._pipe = pipe
        self._scale = float(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._num_good = 0
        self._is_finite: bool | None = None
        """Whether all gradients of this step are finite; None until they are unscaled."""
        self._was_skipped = False

    def is_of(self, pipe: "ParallelModel") -> bool:
        """Return whether this is the scaler of a model."""
        return self._pipe is pipe

    def note_skipped(self) -> None:
        """Note that the gradients of this step were not finite, though they may be gone."""
        self._was_skipped = True

    def get_scale(self) -> float:
        """Return the factor of the gradients."""
        return self._scale

    @torch.no_grad()
    def unscale_(self) -> None:
        """Divide all gradients by the scale, once in a step. All ranks must call it."""
        if self._is_finite is not None:
            raise GradientError(
                f"rank {self._pipe.rank}: unscale_() was already called since the last update(). "
                "Expected one call in each step, before clipping."
            )
        # The largest of all gradients is finite exactly if each of them is.
        largest = self._pipe.clip_grad_norm_(math.inf, norm_type=math.inf)
        factor = 1 / self._scale
        for parameter in self._pipe.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self._is_finite = bool(largest.isfinite()) and not self._was_skipped

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        """Step the optimizer, unless a gradient on any rank is not finite."""
        if self._is_finite is None:
            self.unscale_()
        return optimizer.step() if self._is_finite else None

    def update(self) -> None:
        """Make the scale smaller after a step that was skipped, larger after many that were not."""
        if self._is_finite is None:
            raise GradientError(
                f"rank {self._pipe.rank}: update() was called before step() or unscale_(). "
                "Expected it at the end of each step."
            )
        self._num_good = self._num_good + 1 if self._is_finite else 0
        if not self._is_finite:
            self._scale *= self._backoff_factor
        elif self._num_good == self._growth_interval:
            self._scale *= self._growth_factor
            self._num_good = 0
        self._is_finite, self._was_skipped = None, False

    def state_dict(self) -> dict[str, float]:
        """Return what `save(extra=…)` can keep: the scale, and the steps since it last changed."""
        return {"scale": self._scale, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load what `state_dict` returned."""
        self._scale, self._num_good = float(state["scale"]), int(state["num_good"])


def scale_of(scaler: Any, pipe: "ParallelModel") -> float:
    """Return the scale of the scaler of a model; raise an error for any other."""
    if not isinstance(scaler, GradScaler) or not scaler.is_of(pipe):
        is_ours = isinstance(scaler, GradScaler)
        given = "the GradScaler of another model" if is_ours else f"a {type(scaler).__name__}"
        raise StageError(
            f"scaler is {given}. Expected penstock.GradScaler(pipe): torch's decides for each "
            "rank alone whether to skip a step."
        )
    return scaler.get_scale()

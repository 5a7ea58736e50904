"""The arguments that schedules of compat are made with, and those of their steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import StageError
from penstock.microbatches.loss_weights import LossWeight
from penstock.runtime.pipeline import DEFAULT_TIMEOUT_S
from penstock.runtime.step_settings import LossFn
from penstock.stage import PipelineStage


class OwnOptions(TypedDict, total=False):
    """The options of schedules that torch's do not have: see `penstock.Pipeline`."""

    loss_weight: LossWeight | None
    replica_group: dist.ProcessGroup | DeviceMesh | None
    on_grads_ready: Callable[[PipelineStage], None] | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a schedule that its pipeline is made with; the last are its `OwnOptions`."""

    loss_fn: LossFn | None
    args_chunk_spec: Any
    kwargs_chunk_spec: Any
    output_merge_spec: Any
    scale_grads: bool
    loss_weight: LossWeight | None = None
    replica_group: dist.ProcessGroup | DeviceMesh | None = None
    on_grads_ready: Callable[[PipelineStage], None] | None = None
    timeout: float = DEFAULT_TIMEOUT_S


class Given(NamedTuple):
    """The values that a step was given: a batch, or microbatches that are already cut."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    arg_mbs: list[tuple[Any, ...]] | None
    kwarg_mbs: list[dict[str, Any]] | None
    target_mbs: list[Any] | None
    finalizes: bool = True
    """False if the gradients of sharded stages are kept for a later step to reduce."""

    @property
    def is_cut(self) -> bool:
        return any(mbs is not None for mbs in (self.arg_mbs, self.kwarg_mbs, self.target_mbs))

    def as_keywords(self) -> dict[str, Any]:
        """Return the keyword arguments, with microbatches among them if they are cut."""
        names = ("arg_mbs", "kwarg_mbs", "target_mbs")
        cut = {name: getattr(self, name) for name in names} if self.is_cut else {}
        return {**self.kwargs, **cut}

    def check(self) -> None:
        """Raise an error if both a batch and microbatches were given."""
        if self.is_cut and (self.args or self.kwargs or self.target is not None):
            raise StageError(
                "step() was given both a batch and microbatches that are already cut. Expected "
                "one of them: arg_mbs, kwarg_mbs and target_mbs, or the other arguments."
            )
        for name in ("arg_mbs", "kwarg_mbs", "target_mbs"):
            mbs = getattr(self, name)
            if mbs is not None and not isinstance(mbs, list):
                raise TypeError(
                    f"{name} is a {type(mbs).__name__}. Expected a list with one value for each "
                    "microbatch."
                )

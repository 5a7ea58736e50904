"""The batch of a step, and the settings by which a pipeline runs its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from penstock.ir import Action, MicrobatchId, StageId
from penstock.microbatches.loss_weights import LossWeight
from penstock.stage import PipelineStage

LossFn: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """The values that a step was given, by microbatch."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any]
    loss_kwargs: dict[str, Any]
    order: Sequence[MicrobatchId] = ()
    """By microbatch: its number in the batch that the caller gave; empty if it is the same."""
    work: Sequence[float] = ()
    """By microbatch: the work that it takes; empty if that is not known."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings by which a pipeline runs its steps."""

    loss_fn: LossFn | None
    scale_grads: bool
    loss_weight: LossWeight | None
    on_grads_ready: Callable[[PipelineStage], None] | None
    custom_functions: Mapping[type[Action], "CustomFunction"]
    adds_losses: bool = False
    """True if loss_fn may return several losses, nested in any way, whose sum is trained."""
    keeps_graphs: bool = False
    """True if the outputs of steps without a backward keep their graphs."""
    reduces_grads: bool = True
    """False if the gradients of sharded stages are kept for a later step to reduce."""
    is_final: bool = True
    """False if a later step completes all gradients: none is ready, and DDP does not reduce any."""


class ActionContext(Protocol):
    """The context that a custom function is given, besides the action it is called for."""

    stages: Mapping[StageId, PipelineStage]
    batch: Batch

    def run(self, action: Action) -> None:
        """Run an action, or one half of an overlap, as the pipeline would have."""


CustomFunction: TypeAlias = Callable[[Any, ActionContext], None]

"""Custom functions as torch.distributed.pipelining calls them: with its actions and a context."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.compat.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    _Action,
    _ComputationType,
    as_torch_action,
)
from penstock.compat.stage import PipelineStage
from penstock.errors import StageError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    StageId,
)
from penstock.runtime import ActionContext
from penstock.runtime.step_settings import CustomFunction
from penstock.stage import PipelineStage as OwnStage

KINDS: dict[_ComputationType, type[Action]] = {
    FORWARD: Forward,
    FULL_BACKWARD: Backward,
    BACKWARD_INPUT: BackwardInput,
    BACKWARD_WEIGHT: BackwardWeight,
    OVERLAP_F_B: Overlap,
}


@dataclass
class _PipelineContext:
    """The context that a custom function is given, besides the action it is called for."""

    schedule_ref: Any
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


_CustomFunctionProtocol: TypeAlias = Callable[[_Action, _PipelineContext], None]


def kind_of(computation_type: Any) -> type[Action]:
    """Return the type of action that one of torch's constants stands for."""
    if computation_type in KINDS:
        return KINDS[computation_type]
    if isinstance(computation_type, _ComputationType):
        raise StageError(
            f"computation_type is {computation_type.name}, which cannot be replaced: messages, "
            "gathers and reductions are not actions of a stage here. Expected one of "
            f"{', '.join(kind.name for kind in KINDS)}."
        )
    kind: type[Action] = computation_type  # One of Penstock's own, or refused by the pipeline.
    return kind


def as_own_function(function: _CustomFunctionProtocol, schedule: Any) -> CustomFunction:
    """Return one of torch's custom functions as Penstock calls them."""

    def call(action: Action, context: ActionContext) -> None:
        batch = context.batch
        told = _PipelineContext(schedule, batch.args, batch.kwargs, batch.targets or None)
        with _lent(context, context.stages):
            function(as_torch_action(action), told)

    return call


@contextmanager
def _lent(context: ActionContext, stages: Mapping[StageId, OwnStage]) -> Iterator[None]:
    """Let the stages run actions, such as with `forward_one_chunk`, in this block."""
    thread = threading.get_ident()

    def run(action: Action, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != thread:
            raise StageError(
                f"a custom function runs {action} in a thread of its own. Actions of a step run "
                "one after the other: call it in the thread that called the function."
            )
        if isinstance(action, Forward):
            _check_given(action, args or (), context.batch.args, stages[action.stage].is_first)
            _check_given(action, tuple((kwargs or {}).values()), context.batch.kwargs, True)
        context.run(action)

    own = [stage for stage in stages.values() if isinstance(stage, PipelineStage)]
    for stage in own:
        stage._facts.run = run
    try:
        yield
    finally:
        for stage in own:
            stage._facts.run = None


def _check_given(action: Forward, given: Any, batch: Any, is_used: bool) -> None:
    """Raise an error if a forward was given other values than those of its microbatch."""
    own = batch[action.mb]
    own = tuple(own.values()) if isinstance(own, dict) else own
    is_same = len(given) == len(own) and all(a is b for a, b in zip(given, own, strict=False))
    if is_used and not is_same:
        raise StageError(
            f"a custom function gave {action} other arguments than those of its microbatch, which "
            "would be ignored. Expected ctx.arg_mbs[mb] and ctx.kwarg_mbs[mb]."
        )

"""Context managers that users put around the forwards of a stage."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from penstock.errors import StageError, StepError
from penstock.ir import MicrobatchId, StageId

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStageInfo:
    """The forward for which a context is made.

    `is_metadata_inference` is always False: Penstock learns shapes from the forwards of a step, and
    runs none only to learn them, as torch does.
    """

    stage_index: StageId
    microbatch_index: MicrobatchId
    is_metadata_inference: bool = False


ContextFactory: TypeAlias = Callable[[PipelineStageInfo], AbstractContextManager[Any]]


class ForwardContexts:
    """The context around the forwards of one stage, if there is one; falsy if there is none."""

    def __init__(self, stage: StageId) -> None:
        self._stage = stage
        self._factories: OrderedDict[int, ContextFactory] = OrderedDict()
        """At most one: by the number of its handle, which removes it."""

    def __bool__(self) -> bool:
        return bool(self._factories)

    def register(self, factory: ContextFactory) -> RemovableHandle:
        """Make a context with `factory` for each forward, until the handle is removed."""
        if not callable(factory):
            raise StageError(
                f"the forward context of stage {self._stage} is {factory!r}. Expected a function "
                "from a PipelineStageInfo to a context manager."
            )
        if self._factories:
            raise StepError(
                f"stage {self._stage} already has a forward context. There can be one at a time: "
                "call remove() on the handle of the first, or enter both contexts in one."
            )
        handle = RemovableHandle(self._factories)
        self._factories[handle.id] = factory
        return handle

    def run(
        self,
        mb: MicrobatchId,
        forward: Callable[[], Result],
        needs_graph: Callable[[], bool] | None = None,
    ) -> Result:
        """Run a forward inside its context, if there is one.

        Raise an error if the context turns off the graph, and `needs_graph()` is true.
        """
        factory = next(iter(self._factories.values()), None)
        if factory is None:
            return forward()
        with factory(PipelineStageInfo(stage_index=self._stage, microbatch_index=mb)):
            if needs_graph is not None and not torch.is_grad_enabled() and needs_graph():
                raise self._without_graph(mb)
            return forward()
        raise StepError(
            f"stage {self._stage}, microbatch {mb}: the forward context hid an exception of the "
            "module, so there is no output. Let __exit__ of the context return False."
        )

    def _without_graph(self, mb: MicrobatchId) -> StageError:
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        return StageError(
            f"stage {self._stage}, microbatch {mb}: the forward context turns on torch.{mode}() in "
            "a training step, so the gradients of this stage and of all stages before it would be "
            "missing. Expected a context with gradients enabled, unless the inputs and parameters "
            "of the stage need none. Enter it in eval() only, or freeze the parameters of this "
            "stage and of those before it with requires_grad_(False)."
        )

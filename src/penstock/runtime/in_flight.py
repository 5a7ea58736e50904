"""Microbatches on a stage, between their forward and the end of their backward."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from penstock.ir import Forward, MicrobatchId, StageId
from penstock.ir.dataflow import Dataflow
from penstock.runtime.measuring.observer import Leaves, Note
from penstock.stage import PipelineStage
from penstock.stage.passage import Passage
from penstock.stage.recomputed_parts import DroppedParts, RecomputedParts
from penstock.stage.repeating import Repeated, RepeatedForwards
from penstock.torch_private import pytree

Payload: TypeAlias = tuple[Leaves, pytree.TreeSpec]
"""The leaves of a message, and the structure that they are nested in."""


@dataclass(slots=True)
class InFlight:
    """A microbatch on a stage, between its forward and the end of its backward."""

    passage: Passage
    inputs: list[Leaves]
    """The leaves of each message that arrived, by stage."""
    outputs: list[Payload]
    """The messages to other stages, by stage; empty on the last stage."""
    outside: list[tuple[Tensor, Tensor]]
    """The caller's tensors that need a gradient, each with its stand-in."""
    loss: Tensor | None


@dataclass(slots=True)
class Dropped:
    """A microbatch on a stage between its forward, which kept only its inputs, and the second."""

    repeated: Repeated
    inputs: list[Leaves]
    outside: list[tuple[Tensor, Tensor]]

    def resumed(
        self,
        passage: Passage,
        outputs: list[Payload],
        loss: Tensor | None,
        copies: dict[int, Tensor],
    ) -> InFlight:
        """Return the microbatch after its second forward, which ran on `copies` of some inputs."""
        inputs, outside = self.inputs, self.outside
        if copies:
            inputs = [[copies.get(id(leaf), leaf) for leaf in leaves] for leaves in inputs]
            outside = [(theirs, copies.get(id(own), own)) for theirs, own in outside]
        return InFlight(passage, inputs, outputs, outside, loss)


class DroppingForwards:
    """The forwards of one step that keep only their inputs, or drop what some parts would keep."""

    def __init__(self, loss_fn: Callable[..., Any] | None) -> None:
        self._loss_modules = [loss_fn] if isinstance(loss_fn, nn.Module) else []
        self._forwards: dict[StageId, RepeatedForwards] = {}
        self.dropped: dict[tuple[StageId, MicrobatchId], Dropped] = {}
        """The microbatches that have not run again yet."""
        self._parts: dict[StageId, RecomputedParts] = {}
        self._dropped_parts: dict[tuple[StageId, MicrobatchId], DroppedParts] = {}

    def begin(
        self,
        stage: PipelineStage,
        mb: MicrobatchId,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Repeated:
        """Note what a forward and its loss begin with."""
        index = stage.stage_index
        if index not in self._forwards:
            modules = [stage.submod, *(self._loss_modules if stage.is_last else ())]
            self._forwards[index] = RepeatedForwards(
                modules, stage.device, f"stage {index}", is_sharded=stage.is_sharded
            )
        return self._forwards[index].begin(mb, args, kwargs)

    def of_parts(self, stage: PipelineStage, mb: MicrobatchId) -> AbstractContextManager[None]:
        """Return a context for a forward that drops what its `recomputed` parts would keep."""
        index = stage.stage_index
        if index not in self._parts:
            self._parts[index] = RecomputedParts(
                stage.parts(), stage.device, f"stage {index}", is_sharded=stage.is_sharded
            )
        dropped = self._dropped_parts[index, mb] = self._parts[index].begin(mb)
        return dropped.dropping()

    def fill_in(self, stage: PipelineStage, mb: MicrobatchId, passage: Passage, note: Note) -> None:
        """Run the parts of a forward again that it has dropped; `note` takes what they keep."""
        dropped = self._dropped_parts.pop((stage.stage_index, mb))
        stage.rerun_parts(mb, passage, partial(dropped.again, note))


def share_memory(
    first: Forward,
    payloads: list[Payload],
    flow: Dataflow,
    *takers: Mapping[tuple[StageId, MicrobatchId], InFlight | Dropped],
) -> None:
    """Let the outputs of a second forward use the memory of those of the first.

    They have the same values. Where the stage that takes them is on this rank, it holds the first
    ones until its backward, and there would be two of each.
    """
    for message, (leaves, _) in zip(flow.made(first), payloads, strict=True):
        place = message.taker, message.mb
        for taker in (held[place] for held in takers if place in held):
            inputs = taker.inputs[flow.needed(Forward(*place)).index(message)]
            for leaf, other in zip(leaves, inputs, strict=True):
                are_plain = type(leaf) is type(other) is Tensor
                if are_plain and leaf.requires_grad and leaf.stride() == other.stride():
                    leaf.data = other.data

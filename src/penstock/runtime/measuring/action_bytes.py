"""Count the bytes that a rank holds at each action of a step, to compare with what was planned."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.ir import Message, StageId
from penstock.ir.action import SingleCompute
from penstock.ir.dataflow import Dataflow
from penstock.passes.held_memory import Held
from penstock.runtime.measuring.live_bytes import live_bytes, tensors_in
from penstock.runtime.measuring.observer import AbstractMemoryCount, Leaves, Note, StepView
from penstock.runtime.program import Task
from penstock.stage import PipelineStage


class ActionBytes(AbstractMemoryCount):
    """The bytes of one step on one rank; `held` has each forward and backward that has ended.

    They count from the start of the step, and without the gradients of weights, which stay after
    it. Everything else counts: what microbatches hold, outputs that are kept for the caller, and
    messages until they are released. Unlike `HeldBytes`, it changes nothing in the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.held: dict[SingleCompute, Held] = {}
        self._live = live_bytes(device)
        self._grads_before: dict[StageId, tuple[PipelineStage, int]] = {}

    def begin(self, flow: Dataflow) -> None:
        self._before = self._live.total()

    def take_over(self, leaves: Leaves) -> Leaves:
        return leaves

    def arrived(self, messages: Sequence[Message], leaves: Sequence[Leaves]) -> None:
        self._live.note(tensors_in(leaves))
        self._live.restart_peak()

    @contextmanager
    def watching(self, stage: PipelineStage, arguments: Any) -> Iterator[Note]:
        if stage.stage_index not in self._grads_before:
            self._grads_before[stage.stage_index] = stage, self._live.counted(_grads(stage))
        with self._live.watching(stage, arguments) as note:
            yield note

    def computed(self, task: Task, step: StepView) -> None:
        self._live.note(tensors_in(step.made_by(task)))
        made_grads = sum(
            self._live.counted(_grads(stage)) - before
            for stage, before in self._grads_before.values()
        )
        stays = self._before + max(0, made_grads)
        after = max(0, self._live.total() - stays)
        self.held[task.action] = Held(max(after, self._live.peak() - stays), after)


def _grads(stage: PipelineStage) -> list[Tensor]:
    grads = (parameter.grad for parameter in stage.submod.parameters())
    return [grad for grad in grads if grad is not None]

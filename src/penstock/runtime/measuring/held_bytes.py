"""Count the bytes that microbatches hold from one action to the next, and what actions need."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.ir import Backward, BackwardInput, Forward, Message, MicrobatchId, Recompute, StageId
from penstock.ir.dataflow import Dataflow
from penstock.runtime.measuring.live_bytes import live_bytes, num_bytes, tensors_in
from penstock.runtime.measuring.observer import AbstractMemoryCount, Leaves, Note, StepView
from penstock.runtime.program import Task
from penstock.stage import PipelineStage
from penstock.stage.dtensors import copy_with_spread


class HeldBytes(AbstractMemoryCount):
    """The bytes that the microbatches of one rank hold in a step, one number per microbatch.

    Stages of one rank share what they hand over. While bytes are counted, each works with its own
    copy, so that it is clear which stage keeps what alive.
    """

    def __init__(self, device: torch.device) -> None:
        self.after_forward: defaultdict[StageId, list[int]] = defaultdict(list)
        self.after_input: defaultdict[StageId, list[int]] = defaultdict(list)
        self.after_dropping: defaultdict[StageId, list[int]] = defaultdict(list)
        self.during_dropping: defaultdict[StageId, list[int]] = defaultdict(list)
        """What forwards leave and need that are recomputed; they are not in the others."""
        self.during: defaultdict[tuple[type, StageId], list[int]] = defaultdict(list)
        """By kind and stage: the most beyond what the rank held before the action."""
        self._live = live_bytes(device)
        self._before = self._copied = self._made_grads = 0
        self._held: dict[tuple[StageId, MicrobatchId], int] = {}

    def begin(self, flow: Dataflow) -> None:
        self._flow = flow

    def take_over(self, leaves: Leaves) -> Leaves:
        return _copied(leaves)

    def arrived(self, messages: Sequence[Message], leaves: Sequence[Leaves]) -> None:
        """Count what arrived as the action's own.

        Activations from another stage of this rank are copies of the output that it holds. They
        count only once that stage may have released its output.
        """
        tensors = tensors_in(leaves)
        self._live.note(tensors)
        self._before = self._live.total() - num_bytes(tensors)
        self._copied = num_bytes(self._handed_over(messages, leaves))
        self._made_grads = 0
        self._live.restart_peak()

    @contextmanager
    def watching(self, stage: PipelineStage, arguments: Any) -> Iterator[Note]:
        before = num_bytes(_grads(stage))
        with self._live.watching(stage, arguments) as note:
            yield note
        # The first backward makes the gradients of weights, which stay.
        self._made_grads += max(0, num_bytes(_grads(stage)) - before)

    def computed(self, task: Task, step: StepView) -> None:
        action = task.action
        place = action.stage, action.mb
        besides = self._before + self._copied + self._made_grads
        needed = max(0, self._live.peak() - besides)
        if task.drops:
            self.during_dropping[action.stage].append(needed)
            if step.stages[action.stage].recomputed:  # Its graph holds its outputs, as others do.
                self._held[place] = self._live.total() - self._before
                held = self._held[place] - self._copied
            else:
                self._held[place] = self._change_but_for_results(task, step)
                # What stages of one rank hand over counts for the one that made it, as it does
                # where that keeps its outputs: the taker may hold it until its own backward.
                handed_over = num_bytes(self._handed_over(task.makes, step.made_by(task)))
                held = self._held[place] - self._copied + handed_over
            self.after_dropping[action.stage].append(max(0, held))
            return
        self.during[type(action), action.stage].append(needed)
        if isinstance(action, Forward):
            self._held[place] = self._live.total() - self._before
            self.after_forward[action.stage].append(max(0, self._held[place] - self._copied))
        elif isinstance(action, Recompute):
            self._held[place] += self._live.total() - self._before
        elif isinstance(action, BackwardInput):
            change = self._change_but_for_results(task, step)
            self.after_input[action.stage].append(max(0, self._held.pop(place) + change))
        elif isinstance(action, Backward):
            del self._held[place]

    def _handed_over(
        self, messages: Sequence[Message], leaves: Sequence[Leaves]
    ) -> Iterator[Tensor]:
        """Return the activations that come from, or go to, another stage of this rank."""
        for message, row in zip(messages, leaves, strict=True):
            if not message.is_gradient and not self._flow.is_sent(message):
                yield from tensors_in(row)

    def _change_but_for_results(self, task: Task, step: StepView) -> int:
        """Return how much more is alive than before, without what a task made for others."""
        for leaves in step.made_by(task):
            # Pass copies on, so that what is still alive is what the stage holds.
            leaves[:] = _copied(leaves)
        tensors = tensors_in((step.made_by(task), step.kept_of(task)))
        self._live.note(tensors)
        return self._live.total() - self._before - num_bytes(tensors)


def _grads(stage: PipelineStage) -> Iterator[Tensor]:
    grads = (parameter.grad for parameter in stage.submod.parameters())
    return (grad for grad in grads if grad is not None)


def _copied(leaves: Leaves) -> Leaves:
    return [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy that does not hold the tensor itself, as the graph of a copy would."""
    return copy_with_spread(tensor.detach()).requires_grad_(tensor.requires_grad)

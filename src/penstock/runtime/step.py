"""One batch through the schedule: all state of a step, from its first action to its last."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.comm.collective_results import values_of, waited
from penstock.errors import StageError
from penstock.ir import (
    Action,
    Backward,
    BackwardWeight,
    Forward,
    Message,
    MicrobatchId,
    Send,
    StageId,
)
from penstock.microbatches.hidden_tensors import hides_gradient
from penstock.runtime.losses import Losses
from penstock.runtime.measuring.observer import Leaves, Observer
from penstock.runtime.messages.forms import flatten, unflatten
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.outside_graphs import OutsideGraphs
from penstock.runtime.program import Entry, Program, Task
from penstock.runtime.step_settings import Batch, CustomFunction, Settings
from penstock.runtime.tied_parameters import TiedGrads
from penstock.stage import PipelineStage
from penstock.stage.outputs import as_outputs
from penstock.stage.passage import (
    Passage,
    WeightBackward,
    do_nothing,
    needs_grad,
    stand_in_for,
)
from penstock.torch_private import REGISTER_PYTREE_NODE, pytree

_AUTOCAST_DEVICES = ("cpu", "cuda")

Payload: TypeAlias = tuple[Leaves, pytree.TreeSpec]
"""What a message holds, taken apart."""


@dataclass(slots=True)
class _InFlight:
    """A microbatch on a stage, between its forward and the end of its backward."""

    passage: Passage
    inputs: list[Leaves]
    """The leaves of each message that came, by stage."""
    outputs: list[Payload]
    """What went on, by stage; nothing on the last stage."""
    outside: list[tuple[Tensor, Tensor]]
    """Tensors of the caller's that need a gradient, each with what stood in for it."""
    loss: Tensor | None


@dataclass(slots=True)
class Step:
    """Runs a program once. Made for the step and dropped at its end."""

    program: Program
    stages: Mapping[StageId, PipelineStage]
    mailbox: Mailbox
    batch: Batch
    settings: Settings
    losses: Losses
    has_backward: bool
    keeps_outputs: bool
    needs_losses: bool
    tied: TiedGrads | None
    observer: Observer
    outputs: dict[MicrobatchId, Any] = field(default_factory=dict)
    current: Action | None = None
    """What is being run, for whoever has to say where it went wrong."""
    _left: list[Task] = field(default_factory=list)
    """What a custom function has still to run."""
    _made: dict[Message, Payload] = field(default_factory=dict)
    _in_flight: dict[tuple[StageId, MicrobatchId], _InFlight] = field(default_factory=dict)
    _pending: dict[tuple[StageId, MicrobatchId], WeightBackward] = field(default_factory=dict)
    _outside: OutsideGraphs = field(default_factory=OutsideGraphs)
    _awaiting_others: list[PipelineStage] = field(default_factory=list)
    """Stages whose own gradients are complete, in that order, but those of their ties are not."""

    def run_all(self) -> None:
        """Run the program, from its first action to its last."""
        custom = self.settings.custom_functions
        self.observer.clock.begin()
        self.observer.memory.begin(self.program.flow)
        for entry in self.program.entries:
            self.current = entry.action
            if isinstance(entry.action, Send):
                self._send(entry.action)
                continue
            function = custom.get(type(entry.action)) if custom else None
            if function is None:
                for task in entry.tasks:
                    self._run(task)
            else:
                self._run_custom(entry, function)
        self.current = None
        self.mailbox.finish()
        with _without_autocast():
            self._outside.backward()
            if self.tied is not None:
                # Last, since the caller's graph too may lead to a tied parameter.
                self.tied.exchange()
                for stage in self._awaiting_others:
                    self.settings.on_grads_ready(stage)

    def run(self, action: Action) -> None:
        """Run the action that a custom function was called for, or one half of an overlap."""
        tasks = [task for task in self._left if action in (task.action, self.current)]
        if not tasks:
            raise StageError(
                f"a custom function was called for {self.current} and asks to run {action}. "
                "It may run that action once, or each half of it if it is an overlap."
            )
        for task in tasks:
            self._left.remove(task)
            self._run(task)

    def made_by(self, task: Task) -> Sequence[Leaves]:
        """What a task made for other stages, before it is sent."""
        return [self._made[message][0] for message in task.makes]

    def kept_of(self, task: Task) -> Any:
        """What a task made for the caller: outputs and loss."""
        if not self.stages[task.action.stage].is_last:
            return ()
        return self.outputs.get(task.action.mb), self.losses.values.get(task.action.mb)

    def _run_custom(self, entry: Entry, function: CustomFunction) -> None:
        self._left = list(entry.tasks)
        function(entry.action, self)
        if self._left:
            left = " and ".join(str(task.action) for task in self._left)
            raise StageError(
                f"a custom function was called for {entry.action} and returned without having "
                f"run {left}, which others wait for. Call context.run(action) in it."
            )

    def _send(self, action: Send) -> None:
        self.mailbox.send(action.message, *self._made.pop(action.message))
        self.observer.clock.end(action)

    def _run(self, task: Task) -> None:
        action = task.action
        stage = self.stages[action.stage]
        if isinstance(action, Forward):
            self._forward(task, stage, action.mb)
        else:
            with _without_autocast():
                if isinstance(action, BackwardWeight):
                    self._backward_weight(task, stage, action.mb)
                else:
                    self._backward(task, stage, action.mb)
        self.observer.clock.end(action)
        self.observer.memory.computed(task, self)

    def _forward(self, task: Task, stage: PipelineStage, mb: MicrobatchId) -> None:
        inputs: list[Leaves] = []
        args: tuple[Any, ...] = ()
        for message in task.needs:
            leaves, values = self._take_activation(message)
            inputs.append(leaves)
            args += values
        if stage.is_first:
            args = self.batch.args[mb]
        kwargs = self.batch.kwargs[mb]
        stage.check_inputs(mb, args)
        if not self.has_backward:
            outputs = stage.evaluate(args, kwargs)
            self._hand_on(task, stage, mb, outputs)
            return
        outside: list[tuple[Tensor, Tensor]] = []
        if stage.is_first:
            args, outside = self._outside.cut_off(args)
        if kwargs:
            kwargs, others = self._outside.cut_off(kwargs)
            outside += others
        self.observer.memory.arrived(task.needs, inputs)
        with self.observer.memory.watching(stage, (args, kwargs)) as note:
            passage = stage.forward(args, kwargs, is_split=task.is_split)
            note(passage.outputs)
        loss, payloads = self._hand_on(task, stage, mb, passage.outputs)
        self._in_flight[stage.stage_index, mb] = _InFlight(passage, inputs, payloads, outside, loss)

    def _hand_on(
        self, task: Task, stage: PipelineStage, mb: MicrobatchId, outputs: Any
    ) -> tuple[Tensor | None, list[Payload]]:
        """Put a forward's outputs where they are needed: other stages, the loss, the caller."""
        stage.check_outputs(mb, outputs)
        if task.makes:
            payloads = [flatten(values) for values in stage.share_out(mb, outputs)]
            for message, payload in zip(task.makes, payloads, strict=True):
                if not self.program.flow.is_sent(message):
                    self._hand_over(payload[0], stage, mb)
                self._made[message] = payload
            return None, payloads
        loss = None
        if self.needs_losses:
            with self.observer.memory.watching(stage, outputs):
                loss = self.losses.compute(mb, outputs)
        if self.keeps_outputs:
            self.outputs[mb] = pytree.tree_map_only(Tensor, values_of, outputs)
        return loss, []

    def _hand_over(self, leaves: Leaves, stage: PipelineStage, mb: MicrobatchId) -> None:
        """Get outputs ready for another stage of this rank; raises if a gradient would get lost."""
        for number, leaf in enumerate(leaves):
            if self.has_backward and not isinstance(leaf, Tensor) and hides_gradient(leaf):
                raise StageError(
                    f"stage {stage.stage_index}, microbatch {mb}: output {number} is a "
                    f"{type(leaf).__name__} with a tensor that needs a gradient, which would be "
                    "lost. Return tensors, tuples or dicts, or register its class with "
                    f"{REGISTER_PYTREE_NODE}."
                )
        # What needs no gradient may be the stage's own: a buffer that it changes.
        leaves[:] = [_own_copy(leaf) for leaf in leaves]

    def _take_activation(self, message: Message) -> tuple[Leaves, tuple[Any, ...]]:
        """The leaves that a forward differentiates by, and its arguments made of them."""
        if self.program.flow.is_sent(message):
            form, tensors = self.mailbox.receive(message)
            for tensor, like in zip(tensors, form.tensors, strict=True):
                tensor.requires_grad_(like.requires_grad)
            return list(tensors), form.as_arguments(tensors)
        leaves, structure = self._made.pop(message)
        leaves = self.observer.memory.take_over(leaves)
        own = [stand_in_for(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return own, unflatten(own, structure)

    def _backward(self, task: Task, stage: PipelineStage, mb: MicrobatchId) -> None:
        flight = self._in_flight.pop((stage.stage_index, mb))
        if task.completes_grads:
            stage.expect_last_grads()
        grads, pending = self._differentiate(task, stage, mb, flight)
        if flight.loss is not None:
            self.losses.let_go(mb, flight.loss)
        found = {id(x): waited(g) for x, g in zip(flight.passage.inputs, grads, strict=True)}
        for tensor, stand_in in flight.outside:
            if (grad := found.get(id(stand_in))) is not None:
                self._outside.add(tensor, grad)
        for message, leaves in zip(task.makes, flight.inputs, strict=True):
            self._made[message] = flatten(tuple(found.get(id(x)) for x in leaves if needs_grad(x)))
        if isinstance(task.action, Backward):
            pending()
        else:
            self._pending[stage.stage_index, mb] = pending
        if task.completes_grads:
            self._complete(stage)

    def _differentiate(
        self, task: Task, stage: PipelineStage, mb: MicrobatchId, flight: _InFlight
    ) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """The gradients of a microbatch's inputs, and what its weight backward has to run."""
        arrived: list[Leaves] = []
        grads: Any = None
        if flight.loss is not None:
            grads = self.losses.seed(mb, flight.loss)
        else:
            arguments, arrived = self._take_gradients(task, flight)
            if any(grad is not None for row in arrived for grad in row):
                grads = as_outputs(arguments, flight.passage.outputs)
        self.observer.memory.arrived(task.needs, arrived)
        if grads is None:
            return (None,) * len(flight.passage.inputs), do_nothing
        with self.observer.memory.watching(stage, ()):
            if flight.loss is not None and not self.losses.counts(mb):
                # Zero times its gradient is not zero where the mean of no values is not a number.
                return flight.passage.backward_of_nothing()
            return flight.passage.backward(grads, flight.loss)

    def _take_gradients(
        self, task: Task, flight: _InFlight
    ) -> tuple[tuple[Any, ...], list[Leaves]]:
        """The gradients of a microbatch's outputs, as the outputs are nested and by message."""
        arguments: tuple[Any, ...] = ()
        rows: list[Leaves] = []
        for message, (leaves, structure) in zip(task.needs, flight.outputs, strict=True):
            arriving = iter(self._take_gradient(message))
            grads = [next(arriving) if needs_grad(leaf) else None for leaf in leaves]
            rows.append(grads)
            arguments += unflatten(grads, structure)
        return arguments, rows

    def _take_gradient(self, message: Message) -> list[Tensor | None]:
        """The gradients of those outputs that need one, in order; None if nobody used it."""
        if not self.program.flow.is_sent(message):
            leaves, _ = self._made.pop(message)
            return leaves
        form, tensors = self.mailbox.receive(message)
        arriving = iter(tensors)
        return [None if leaf is None else next(arriving) for leaf in form.leaves]

    def _backward_weight(self, task: Task, stage: PipelineStage, mb: MicrobatchId) -> None:
        pending = self._pending.pop((stage.stage_index, mb))
        if task.completes_grads:
            stage.expect_last_grads()
        pending()
        if task.completes_grads:
            self._complete(stage)

    def _complete(self, stage: PipelineStage) -> None:
        if self.tied is not None and stage.stage_index in self.tied.stages:
            self._awaiting_others.append(stage)
        else:
            self.settings.on_grads_ready(stage)


def _own_copy(leaf: Any) -> Any:
    return leaf.clone() if type(leaf) is Tensor and not leaf.requires_grad else leaf


def _without_autocast() -> ExitStack:
    """Autocast is for forwards; a backward runs in the types that its forward chose."""
    context = ExitStack()
    for device_type in _AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device_type):
            context.enter_context(torch.autocast(device_type, enabled=False))
    return context

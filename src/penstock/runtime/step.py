"""One batch through the schedule: all state of a step, from its first action to its last."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.pending import values_of, waited
from penstock.errors import StageError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    MicrobatchId,
    StageId,
)
from penstock.ir.action import SEND_TYPES
from penstock.microbatches.hidden_tensors import hides_gradient
from penstock.microbatches.loss_weights import LossWeight, LossWeights
from penstock.runtime.measuring.held_bytes import HeldBytes, Note, note_nothing
from penstock.runtime.measuring.meter import Meter
from penstock.runtime.messages.forms import flatten, unflatten
from penstock.runtime.messages.routes import Key
from penstock.runtime.messages.wire import Wire
from penstock.runtime.program import Entry, Program, Task
from penstock.runtime.tied_parameters import TiedGrads
from penstock.stage import PipelineStage
from penstock.stage.outputs import as_outputs
from penstock.stage.passage import Passage, WeightBackward, do_nothing, needs_grad, stand_in_for

_AUTOCAST_DEVICES = ("cpu", "cuda")

LossFn: TypeAlias = Callable[..., Any]
Message: TypeAlias = tuple[list[Any], pytree.TreeSpec]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step was given, by microbatch."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any]
    loss_kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a pipeline runs its steps."""

    loss_fn: LossFn | None
    scale_grads: bool
    loss_weight: LossWeight | None
    on_grads_ready: Callable[[PipelineStage], None]
    custom_functions: Mapping[type[Action], "CustomFunction"]


class ActionContext(Protocol):
    """What a custom function is given beside the action that it runs in place of."""

    stages: Mapping[StageId, PipelineStage]
    batch: Batch

    def run(self, action: Action) -> None:
        """Run an action, or one half of an overlap, as the pipeline would have."""


CustomFunction: TypeAlias = Callable[[Any, ActionContext], None]


@dataclass(slots=True)
class _InFlight:
    """A microbatch on a stage, between its forward and the end of its backward."""

    passage: Passage
    inputs: list[list[Any]]
    """The leaves of each message that came: those from afar, and last the neighbour's."""
    outputs: list[Message]
    """What went on: to the next stage, then to those further away; nothing on the last stage."""
    outside: list[tuple[Tensor, Tensor]]
    """Tensors of the caller's that need a gradient, each with what stood in for it."""
    loss: Tensor | None


@dataclass(slots=True)
class Step:
    """Runs a program once. Made for the step and dropped at its end."""

    program: Program
    stages: Mapping[StageId, PipelineStage]
    wire: Wire
    batch: Batch
    settings: Settings
    loss_weights: LossWeights
    has_backward: bool
    keeps_outputs: bool
    needs_losses: bool
    tied: TiedGrads | None
    meter: Meter | None = None
    outputs: dict[MicrobatchId, Any] = field(default_factory=dict)
    losses: dict[MicrobatchId, Any] = field(default_factory=dict)
    current: Action | None = None
    """What is being run, for whoever has to say where it went wrong."""
    _left: list[Task] = field(default_factory=list)
    """What a custom function has still to run."""
    _held_back: dict[Key, Message] | None = None
    """While a custom function runs: what skips stages and is to be sent when it is done."""
    _made: dict[Key, Message] = field(default_factory=dict)
    _in_flight: dict[tuple[StageId, MicrobatchId], _InFlight] = field(default_factory=dict)
    _pending: dict[tuple[StageId, MicrobatchId], WeightBackward] = field(default_factory=dict)
    _shapes: list[torch.Size] | None = None
    """Those of the first outputs, where nothing else tells the sizes of microbatches."""
    _outside_grads: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _awaiting_others: list[PipelineStage] = field(default_factory=list)
    """Stages whose own gradients are complete, in that order, but those of their ties are not."""

    def run_all(self) -> None:
        """Run the program, from its first action to its last."""
        custom = self.settings.custom_functions
        if self.meter is not None:
            self.meter.begin()
        for entry in self.program.entries:
            self.current = entry.action
            function = custom.get(type(entry.action)) if custom else None
            if function is None:
                for task in entry.tasks:
                    self._run(task)
            else:
                self._run_custom(entry, function)
        self.current = None
        self.wire.finish()
        if self._outside_grads:
            tensors, grads = zip(*self._outside_grads, strict=True)
            with _without_autocast():
                torch.autograd.backward(tensors, grads)
        if self.tied is not None:
            # Last, since the caller's graph too may lead to a tied parameter.
            self.tied.exchange()
            with _without_autocast():
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

    def _run_custom(self, entry: Entry, function: CustomFunction) -> None:
        self._left = list(entry.tasks)
        self._held_back = {}
        function(entry.action, self)
        held_back, self._held_back = self._held_back, None
        if self._left:
            left = " and ".join(str(task.action) for task in self._left)
            raise StageError(
                f"a custom function was called for {entry.action} and returned without having "
                f"run {left}, which others wait for. Call context.run(action) in it."
            )
        # The halves of an overlap may have run in either order; the receiver counts on this one.
        for task in entry.tasks:
            for key in task.makes_for_afar:
                if key in held_back:
                    self.wire.send(key, *held_back[key])

    def _run(self, task: Task) -> None:
        action = task.action
        if isinstance(action, SEND_TYPES):
            assert task.makes is not None
            self.wire.send(task.makes, *self._made.pop(task.makes))
        elif isinstance(action, Forward):
            self._forward(task, self.stages[action.stage], action.mb)
        else:
            with _without_autocast():
                if isinstance(action, BackwardWeight):
                    self._backward_weight(task, self.stages[action.stage], action.mb)
                else:
                    self._backward(task, self.stages[action.stage], action.mb)
        if self.meter is not None:
            self._measure(task, self.meter)

    def _measure(self, task: Task, meter: Meter) -> None:
        """Tell the meter that a task has been run, and what is not the stage's any more."""
        action = task.action
        meter.end(action)
        if meter.held is None or isinstance(action, SEND_TYPES):
            return
        given: list[Any] = []
        if self.stages[action.stage].is_last:
            given += self.outputs.get(action.mb), self.losses.get(action.mb)
        if isinstance(action, BackwardInput) and task.makes is not None:
            # A copy goes on, so that what is still alive is what the weight backward holds.
            leaves, structure = self._made.pop(task.makes)
            copies = _copied(leaves)
            self._made[task.makes] = copies, structure
            given += copies
            del leaves
        meter.held.end(action, given)

    @property
    def _held(self) -> HeldBytes | None:
        return None if self.meter is None else self.meter.held

    def _watching(self, stage: PipelineStage, arguments: Any) -> AbstractContextManager[Note]:
        """Where a stage computes: its memory may be counted."""
        held = self._held
        return nullcontext(note_nothing) if held is None else held.watching(stage, arguments)

    def _forward(self, task: Task, stage: PipelineStage, mb: MicrobatchId) -> None:
        inputs: list[list[Any]] = []
        args: tuple[Any, ...] = ()
        for key in (*task.needs_from_afar, task.needs):
            if key is None:
                args += self.batch.args[mb]
            else:
                leaves, values = self._take_activation(key)
                inputs.append(leaves)
                args += values
        kwargs = self.batch.kwargs[mb]
        stage.check_inputs(mb, args)
        if not self.has_backward:
            outputs = stage.evaluate(args, kwargs)
            self._hand_on(task, stage, mb, outputs)
            return
        outside: list[tuple[Tensor, Tensor]] = []
        if task.needs is None:
            args = _stand_ins(args, outside)
        if kwargs:
            kwargs = _stand_ins(kwargs, outside)
        if self._held is not None:
            self._held.begin(*self._by_origin(task, inputs))
        with self._watching(stage, (args, kwargs)) as note:
            passage = stage.forward(args, kwargs, is_split=task.is_split)
            note(passage.outputs)
        loss, messages = self._hand_on(task, stage, mb, passage.outputs)
        self._in_flight[stage.stage_index, mb] = _InFlight(passage, inputs, messages, outside, loss)

    def _by_origin(self, task: Task, inputs: list[list[Any]]) -> tuple[list[Any], list[Any]]:
        """The leaves that came from other ranks, and those of this rank."""
        keys = [key for key in (*task.needs_from_afar, task.needs) if key is not None]
        came: tuple[list[Any], list[Any]] = [], []
        for key, leaves in zip(keys, inputs, strict=True):
            came[0 if self.program.routes.is_message(key) else 1].extend(leaves)
        return came

    def _hand_on(
        self, task: Task, stage: PipelineStage, mb: MicrobatchId, outputs: Any
    ) -> tuple[Tensor | None, list[Message]]:
        """Put a forward's outputs where they are needed: other stages, the loss, the caller."""
        stage.check_outputs(mb, outputs)
        if task.makes is not None:
            messages = [flatten(values) for values in stage.share_out(mb, outputs)]
            keys: list[Key] = [task.makes, *task.makes_for_afar]
            for key, (leaves, _) in zip(keys, messages, strict=True):
                if not self.program.routes.is_message(key):
                    self._check_handed_over(leaves, stage, mb)
                    # What needs no gradient may be the stage's own: a buffer that it changes.
                    leaves[:] = [_own_copy(leaf) for leaf in leaves]
            self._made[task.makes] = messages[0]
            self._send_afar(task, messages[1:])
            return None, messages
        loss = None
        if self.settings.loss_fn is not None and self.needs_losses:
            with self._watching(stage, outputs):
                loss = self._compute_loss(mb, outputs)
        if self.keeps_outputs:
            self.outputs[mb] = pytree.tree_map_only(Tensor, values_of, outputs)
        return loss, []

    def _check_handed_over(self, leaves: list[Any], stage: PipelineStage, mb: MicrobatchId) -> None:
        """Raises if a gradient would get lost on the way to another stage of this rank."""
        for number, leaf in enumerate(leaves):
            if self.has_backward and not isinstance(leaf, Tensor) and hides_gradient(leaf):
                raise StageError(
                    f"stage {stage.stage_index}, microbatch {mb}: output {number} is a "
                    f"{type(leaf).__name__} with a tensor that needs a gradient, which would be "
                    "lost. Return tensors, tuples or dicts, or register its class with "
                    "torch.utils._pytree.register_pytree_node."
                )

    def _send_afar(self, task: Task, messages: list[Message]) -> None:
        for key, message in zip(task.makes_for_afar, messages, strict=True):
            if not self.program.routes.is_message(key):
                self._made[key] = message
            elif self._held_back is None:
                self.wire.send(key, *message)
            else:
                self._held_back[key] = message

    def _compute_loss(self, mb: MicrobatchId, outputs: Any) -> Tensor | None:
        assert self.settings.loss_fn is not None
        with torch.set_grad_enabled(self.has_backward):
            target = self.batch.targets[mb] if self.batch.targets else None
            try:
                loss = self.settings.loss_fn(outputs, target, **self.batch.loss_kwargs)
            except Exception as exc:
                if target is None:
                    exc.add_note("no target was given on this rank, which holds the last stage")
                raise
        self.losses[mb] = waited(loss)
        if not self.has_backward:
            return None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r}"
            raise StageError(
                f"loss_fn returned a loss {got} for microbatch {mb}. Expected a tensor with one "
                "value: let it return the mean, or the sum with scale_grads=False."
            )
        if not self.loss_weights.are_known:
            self._check_alike(mb, outputs)
        if not loss.requires_grad and any(map(needs_grad, pytree.tree_leaves(outputs))):
            raise StageError(
                f"loss_fn returned a loss that needs no gradient for microbatch {mb}, though the "
                "outputs do, so nothing would be trained. Compute it from the outputs, without "
                "detach() or item()."
            )
        return loss

    def _check_alike(self, mb: MicrobatchId, outputs: Any) -> None:
        """Raises if microbatches differ in size, and so would have to count differently."""
        shapes = [leaf.shape for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if self._shapes is None:
            self._shapes = shapes
        elif shapes != self._shapes:
            raise StageError(
                f"the outputs of microbatch {mb} have shapes {list(map(tuple, shapes))}, but those "
                f"of the first one have {list(map(tuple, self._shapes))}, so their losses should "
                "not count alike. Expected equal shapes, or a way to tell the sizes on this rank, "
                "which holds the last stage. Give step() the target there, or step_microbatches() "
                "the weights; or let loss_fn return sums, with scale_grads=False."
            )

    def _take_activation(self, key: Key) -> tuple[list[Any], tuple[Any, ...]]:
        """The leaves that a forward differentiates by, and its arguments made of them."""
        if self.program.routes.is_message(key):
            form, tensors = self.wire.receive(key)
            for tensor, like in zip(tensors, form.tensors, strict=True):
                tensor.requires_grad_(like.requires_grad)
            return list(tensors), form.as_arguments(tensors)
        leaves, structure = self._made.pop(key)
        if self._held is not None:
            leaves = _copied(leaves)
        own = [stand_in_for(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return own, unflatten(own, structure)

    def _backward(self, task: Task, stage: PipelineStage, mb: MicrobatchId) -> None:
        flight = self._in_flight.pop((stage.stage_index, mb))
        if task.completes_grads:
            stage.expect_last_grads()
        grads, pending = self._differentiate(task, stage, mb, flight)
        if flight.loss is not None:
            self.losses[mb] = values_of(flight.loss)  # Its graph would keep the stage's inputs.
        found = {id(x): waited(g) for x, g in zip(flight.passage.inputs, grads, strict=True)}
        for tensor, stand_in in flight.outside:
            if (grad := found.get(id(stand_in))) is not None:
                self._outside_grads.append((tensor, grad))
        messages = [
            flatten(tuple(found.get(id(x)) for x in leaves if needs_grad(x)))
            for leaves in flight.inputs
        ]
        if task.makes is not None:
            self._made[task.makes] = messages.pop()
        self._send_afar(task, messages)
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
        arrived: list[Any] = []
        grads: Any = None
        if flight.loss is not None:
            if flight.loss.requires_grad:
                grads = torch.full_like(
                    flight.loss, self.loss_weights.seeds[mb], requires_grad=False
                )
        else:
            arguments, arrived = self._take_gradients(task, flight)
            if any(grad is not None for grad in arrived):
                grads = as_outputs(arguments, flight.passage.outputs)
        if self._held is not None:
            self._held.begin(arrived)
        if grads is None:
            return (None,) * len(flight.passage.inputs), do_nothing
        with self._watching(stage, ()):
            if flight.loss is not None and self.loss_weights.seeds[mb] == 0:
                # Zero times its gradient is not zero where the mean of no values is not a number.
                return flight.passage.backward_of_nothing()
            return flight.passage.backward(grads, flight.loss)

    def _take_gradients(
        self, task: Task, flight: _InFlight
    ) -> tuple[tuple[Any, ...], list[Tensor | None]]:
        """The gradients of a microbatch's outputs, as the outputs are nested and in a row."""
        assert task.needs is not None
        arguments: tuple[Any, ...] = ()
        row: list[Tensor | None] = []
        keys: list[Key] = [task.needs, *task.needs_from_afar]
        for key, (leaves, structure) in zip(keys, flight.outputs, strict=True):
            arriving = iter(self._take_gradient(key))
            grads = [next(arriving) if needs_grad(leaf) else None for leaf in leaves]
            row += grads
            arguments += unflatten(grads, structure)
        return arguments, row

    def _take_gradient(self, key: Key) -> list[Tensor | None]:
        """The gradients of those outputs that need one, in order; None if nobody used it."""
        if not self.program.routes.is_message(key):
            leaves, _ = self._made.pop(key)
            return leaves
        form, tensors = self.wire.receive(key)
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


def _copied(leaves: list[Any]) -> list[Any]:
    """Leaves in memory of their own, where it is counted who holds what."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _without_autocast() -> ExitStack:
    """Autocast is for forwards; a backward runs in the types that its forward chose."""
    context = ExitStack()
    for device_type in _AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device_type):
            context.enter_context(torch.autocast(device_type, enabled=False))
    return context


def _stand_ins(value: Any, outside: list[tuple[Tensor, Tensor]]) -> Any:
    """The value with leaves of our own for the caller's tensors that need a gradient.

    The caller's graph behind them is gone through once, at the end of the step.
    """
    leaves, structure = flatten(value) if isinstance(value, tuple) else pytree.tree_flatten(value)
    if not any(map(needs_grad, leaves)):
        return value
    for number, leaf in enumerate(leaves):
        if needs_grad(leaf):
            leaves[number] = stand_in_for(leaf)
            outside.append((leaf, leaves[number]))
    return pytree.tree_unflatten(leaves, structure)

"""One batch through the schedule: all state of a step, from its first action to its last."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, cast

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
    Recompute,
    ReduceGrads,
    Reshard,
    Send,
    StageId,
    Unshard,
)
from penstock.ir.action import SHARDING_TYPES, Sharding, SingleCompute
from penstock.runtime.in_flight import (
    Dropped,
    DroppingForwards,
    InFlight,
    Payload,
    share_memory,
)
from penstock.runtime.losses import Losses
from penstock.runtime.measuring.observer import UNWATCHED, Leaves, Observer
from penstock.runtime.messages.forms import Form, flatten, unflatten
from penstock.runtime.messages.handing_over import hand_over
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.messages.rebuilt_gradients import rebuild_gradients
from penstock.runtime.outside_graphs import OutsideGraphs
from penstock.runtime.program import Entry, Program, Task
from penstock.runtime.step_settings import Batch, CustomFunction, Settings
from penstock.runtime.tied_parameters import TiedGrads
from penstock.runtime.without_autocast import without_autocast
from penstock.stage import PipelineStage
from penstock.stage.outputs import as_outputs
from penstock.stage.passage import (
    Passage,
    WeightBackward,
    do_nothing,
    needs_grad,
    stand_in_for,
)
from penstock.stage.repeating import nothing_saved
from penstock.torch_private import is_any_autocast_enabled, pytree
from penstock.watch.place import ACTION, Place

_NONE = frozenset((NoneType,))


@dataclass(slots=True)
class Step:
    """One run of a program: made for the step and dropped at its end."""

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
    place: Place
    outputs: dict[MicrobatchId, Any] = field(default_factory=dict)
    current: Action | None = None
    """The action that is running, for error messages."""
    _left: list[Task] = field(default_factory=list)
    """The tasks that a custom function still has to run."""
    _made: dict[Message, Payload] = field(default_factory=dict)
    _arrived: dict[Message, tuple[Form, list[Tensor]]] = field(default_factory=dict)
    """The messages of other ranks that the next action needs, if the step is watched."""
    _receive: Callable[[Message], tuple[Form, list[Tensor]]] = field(init=False)
    _in_flight: dict[tuple[StageId, MicrobatchId], InFlight] = field(default_factory=dict)
    _pending: dict[tuple[StageId, MicrobatchId], WeightBackward] = field(default_factory=dict)
    _outside: OutsideGraphs = field(default_factory=OutsideGraphs)
    _awaiting_others: list[PipelineStage] = field(default_factory=list)
    """Stages whose own gradients are complete, in that order, but whose ties' are not."""

    _is_plain: bool = field(init=False)
    """True if nobody watches, and no forward runs twice."""
    _dropping: DroppingForwards = field(init=False)
    """Those that run twice; not set if the step is plain."""

    def __post_init__(self) -> None:
        self._is_plain = self.observer is UNWATCHED and not self.program.recomputes
        self._receive = self.mailbox.receive if self._is_plain else self._arrived.pop
        if not self._is_plain:
            self._dropping = DroppingForwards(self.settings.loss_fn)

    def run_all(self) -> None:
        """Run the program, from its first action to its last."""
        self.observer.clock.begin()
        self.observer.memory.begin(self.program.flow)
        if self.has_backward:
            for index, stage in self.stages.items():
                stage.begin_step(is_scheduled=index in self.program.gathered)
        custom, run = self.settings.custom_functions, self._run_task
        memory = self.place.enter_step()
        for entry in self.program.entries:
            self.current = action = entry.action
            memory[ACTION] = entry.words
            if entry.tasks:
                if custom and (function := custom.get(type(action))) is not None:
                    self._run_custom(entry, function)
                else:
                    for task in entry.tasks:
                        run(task)
            elif isinstance(action, Send):
                self._send(action)
            elif isinstance(action, SHARDING_TYPES):
                with self.observer.ranges.sharding(action):
                    self._gather_or_reduce(action)
        self.current = None
        self.place.leave_actions()
        ranges = self.observer.ranges
        with ranges.ending("wait for the end of all sends"):
            self.mailbox.finish()
        with ranges.ending("wait for the end of all reductions"):
            for stage in self.stages.values():
                stage.end_step()
        with without_autocast():
            self._outside.backward()
            if self.tied is not None:
                # Last, since the caller's graph may also lead to a tied parameter.
                with ranges.ending("exchange tied gradients"):
                    self.tied.exchange()
                if self.settings.on_grads_ready is not None:
                    for stage in self._awaiting_others:
                        self.settings.on_grads_ready(stage)

    def run(self, action: Action) -> None:
        """Run the action that a custom function was called for, or one half of an overlap."""
        tasks = [task for task in self._left if action in (task.action, self.current)]
        if not tasks:
            raise StageError(
                f"a custom function was called for {self.current} and tried to run {action}. "
                "It may run the action it was called for once, or each half of an overlap once."
            )
        for task in tasks:
            self._left.remove(task)
            self._run_task(task)

    def made_by(self, task: Task) -> Sequence[Leaves]:
        """Return what a task made for other stages, before it is sent."""
        return [self._made[message][0] for message in task.makes]

    def kept_of(self, task: Task) -> Any:
        """Return what a task made for the caller: outputs and loss."""
        if not self.stages[task.action.stage].is_last:
            return ()
        return self.outputs.get(task.action.mb), self.losses.values.get(task.action.mb)

    def _run_custom(self, entry: Entry, function: CustomFunction) -> None:
        self._left = list(entry.tasks)
        function(entry.action, self)
        if self._left:
            left = " and ".join(str(task.action) for task in self._left)
            raise StageError(
                f"a custom function was called for {entry.action} and returned without running "
                f"{left}, which other actions wait for. Call context.run(action) in it."
            )

    def _send(self, action: Send) -> None:
        message = action.message
        leaves, structure = self._made.pop(message)
        if self.observer is UNWATCHED:
            self.mailbox.send(message, leaves, structure)
            return
        with self.observer.ranges.sending(action):
            self.mailbox.send(message, leaves, structure)
        self.observer.clock.end(action)

    def _gather_or_reduce(self, action: Sharding) -> None:
        stage = self.stages[action.stage]
        match action:
            case Unshard():
                stage.unshard()
                self.observer.clock.start(action, stage.endings)
            case Reshard():
                # If the order does not say when to gather, it was added to free as early as can be.
                is_said = action.stage in self.program.gathered
                are_pending = any(index == action.stage for index, _ in self._pending)
                stage.reshard(has_weight_backwards=are_pending and not is_said)
                if is_said:
                    self.observer.clock.end(action)
            case ReduceGrads():
                if stage.is_sharded:  # Otherwise its last backward has completed it.
                    stage.start_reduction(is_final=self.settings.reduces_grads)
                    if self.settings.reduces_grads:
                        self._complete(stage)
                self.observer.clock.start(action, stage.endings)

    @property
    def _run_task(self) -> Callable[[Task], None]:
        return self._run if self._is_plain else self._run_specially

    def _run_specially(self, task: Task) -> None:
        """Wait for the messages of a task first, so that the observer sees it apart from that."""
        observer = self.observer
        for message in task.needs:
            if message not in self._made:
                with observer.ranges.waiting(message):
                    self._arrived[message] = self.mailbox.receive(message)
        with observer.ranges.computing(task.action):
            if isinstance(task.action, Recompute):
                self._recompute(task, self.stages[task.action.stage], task.action.mb)
            else:
                self._run(task)
        observer.clock.end(task.action)
        observer.memory.computed(task, self)

    def _run(self, task: Task) -> None:
        action = task.action
        stage = self.stages[action.stage]
        if isinstance(action, Forward):
            self._forward(task, stage, action.mb)
        elif is_any_autocast_enabled():
            with without_autocast():
                self._run_backward(task, stage, action)
        else:
            self._run_backward(task, stage, action)

    def _run_backward(self, task: Task, stage: PipelineStage, action: SingleCompute) -> None:
        if isinstance(action, BackwardWeight):
            self._backward_weight(task, stage, action.mb)
        else:
            self._backward(task, stage, action.mb)

    def _forward(self, task: Task, stage: PipelineStage, mb: MicrobatchId) -> None:
        inputs: list[Leaves] = []
        args: tuple[Any, ...] = ()
        for message in task.needs:
            leaves, values = self._take_activation(message)
            inputs.append(leaves)
            args += values
        is_first = not task.needs  # Every other stage needs the outputs of the one before it.
        if is_first:
            args = self.batch.args[mb]
        kwargs = self.batch.kwargs[mb]
        if stage.has_examples:
            stage.check_inputs(mb, args)
        if not self.has_backward:
            # Graphs end between stages, so only that of the last one leads to its outputs.
            keeps_graph = self.settings.keeps_graphs and stage.is_last
            outputs = stage.evaluate(mb, args, kwargs, keeps_graph=keeps_graph)
            self._hand_on(task, stage, mb, outputs)
            return
        outside: list[tuple[Tensor, Tensor]] = []
        if is_first:
            args, outside = self._outside.cut_off(args)
        if kwargs:
            kwargs, others = self._outside.cut_off(kwargs)
            outside += others
        if self._is_plain:
            passage = stage.forward(mb, args, kwargs, is_split=task.is_split)
        else:
            self.observer.memory.arrived(task.needs, inputs)
            if task.drops and not stage.recomputed:
                self._drop(task, stage, args, kwargs, inputs, outside)
                return
            passage = self._watch_forward(task, stage, args, kwargs)
        loss, payloads = self._hand_on(task, stage, mb, passage.outputs)
        self._in_flight[stage.stage_index, mb] = InFlight(passage, inputs, payloads, outside, loss)

    def _watch_forward(
        self, task: Task, stage: PipelineStage, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Passage:
        mb, drops_parts = task.action.mb, task.drops and bool(stage.recomputed)
        is_split = task.is_split and drops_parts is task.drops
        with self.observer.memory.watching(stage, (args, kwargs)) as note:
            with self._dropping.of_parts(stage, mb) if drops_parts else nullcontext():
                passage = stage.forward(mb, args, kwargs, is_split=is_split)
            note(passage.outputs)
        return passage

    def _drop(
        self,
        task: Task,
        stage: PipelineStage,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Leaves],
        outside: list[tuple[Tensor, Tensor]],
    ) -> None:
        """Run a forward whose backward needs another one; keep only its inputs."""
        mb = task.action.mb
        repeated = self._dropping.begin(stage, mb, args, kwargs)
        with nothing_saved():
            outputs = self._watch_forward(task, stage, args, kwargs).outputs
            outputs = pytree.tree_map_only(Tensor, stand_in_for, outputs)
            loss, _ = self._hand_on(task, stage, mb, outputs)
        repeated.settle()
        if loss is not None:
            self.losses.let_go(mb)
        self._dropping.dropped[stage.stage_index, mb] = Dropped(repeated, inputs, outside)

    def _recompute(self, task: Task, stage: PipelineStage, mb: MicrobatchId) -> None:
        """Run a forward again, with the graph that its backward needs."""
        self.observer.memory.arrived((), ())
        if stage.recomputed:
            with self.observer.memory.watching(stage, ()) as note:
                passage = self._in_flight[stage.stage_index, mb].passage
                self._dropping.fill_in(stage, mb, passage, note)
            return
        dropped = self._dropping.dropped.pop((stage.stage_index, mb))
        loss: Tensor | None = None
        payloads: list[Payload] = []
        with dropped.repeated.again() as ((args, kwargs), copies):
            passage = self._watch_forward(task, stage, args, kwargs)
            if not stage.is_last:
                payloads = [flatten(values) for values in stage.share_out(mb, passage.outputs)]
                takers = self._in_flight, self._dropping.dropped
                share_memory(Forward(stage.stage_index, mb), payloads, self.program.flow, *takers)
            elif self.needs_losses:
                value = self.losses.values[mb]
                loss = self._compute_loss(stage, mb, passage.outputs)
                self.losses.values[mb] = value  # Without a graph, until the backward.
        self._in_flight[stage.stage_index, mb] = dropped.resumed(passage, payloads, loss, copies)

    def _hand_on(
        self, task: Task, stage: PipelineStage, mb: MicrobatchId, outputs: Any
    ) -> tuple[Tensor | None, list[Payload]]:
        """Put a forward's outputs where they are needed: other stages, the loss, the caller."""
        if stage.has_examples:
            stage.check_outputs(mb, outputs)
        if task.makes:
            payloads = []
            for message, values in zip(task.makes, stage.share_out(mb, outputs), strict=True):
                payload = flatten(values)
                if message.taker in self.stages:
                    hand_over(payload[0], stage, mb, has_backward=self.has_backward)
                self._made[message] = payload
                payloads.append(payload)
            return None, payloads
        loss = None
        if self.needs_losses:
            loss = self._compute_loss(stage, mb, outputs)
        if self.keeps_outputs:
            kept = waited if self.settings.keeps_graphs else values_of
            self.outputs[mb] = pytree.tree_map_only(Tensor, kept, outputs)
        return loss, []

    def _compute_loss(self, stage: PipelineStage, mb: MicrobatchId, outputs: Any) -> Tensor | None:
        if self.observer is UNWATCHED:
            return self.losses.compute(mb, outputs)
        with (
            self.observer.ranges.loss(stage.stage_index, mb),
            self.observer.memory.watching(stage, outputs),
        ):
            return self.losses.compute(mb, outputs)

    def _take_activation(self, message: Message) -> tuple[Leaves, tuple[Any, ...]]:
        """Return the leaves of a forward's graph, and the arguments that are made of them."""
        made = self._made.pop(message, None)
        if made is not None:
            leaves = self.observer.memory.take_over(made[0])
            own = [stand_in_for(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return own, unflatten(own, made[1])
        form, tensors = self._receive(message)
        if not form.are_plain:
            stage = self.stages[message.taker]
            tensors = [
                stage.rebuild(part, like.spread, message.mb)
                for part, like in zip(tensors, form.tensors, strict=True)
            ]
        for tensor, like in zip(tensors, form.tensors, strict=True):
            if like.requires_grad:
                tensor.requires_grad_()
        return tensors, form.as_arguments(tensors)

    def _backward(self, task: Task, stage: PipelineStage, mb: MicrobatchId) -> None:
        flight = self._in_flight.pop((stage.stage_index, mb))
        if task.completes_grads and self.settings.is_final:
            stage.expect_last_grads()
        grads, pending = self._differentiate(task, stage, mb, flight)
        if flight.loss is not None:
            self.losses.let_go(mb)
        self._hand_back(task, flight, grads)
        if isinstance(task.action, Backward):
            self._add_grads(task, stage, pending)
        else:
            self._pending[stage.stage_index, mb] = pending

    def _hand_back(self, task: Task, flight: InFlight, grads: tuple[Tensor | None, ...]) -> None:
        """Put the gradients of a stage's inputs where they are needed: other stages, the caller."""
        inputs = flight.passage.inputs
        if len(inputs) == len(flight.inputs) == 1 and not flight.outside:
            (x,), (leaves,) = inputs, flight.inputs
            if len(leaves) == 1 and leaves[0] is x and x.requires_grad:
                # One tensor from one stage, as nearly always: there is nothing to look for.
                self._made[task.makes[0]] = flatten((waited(grads[0]),))
                return
        found = {id(x): waited(g) for x, g in zip(inputs, grads, strict=True)}
        for tensor, stand_in in flight.outside:
            if (grad := found.get(id(stand_in))) is not None:
                self._outside.add(tensor, grad)
        for message, leaves in zip(task.makes, flight.inputs, strict=True):
            self._made[message] = flatten(tuple(found.get(id(x)) for x in leaves if needs_grad(x)))

    def _differentiate(
        self, task: Task, stage: PipelineStage, mb: MicrobatchId, flight: InFlight
    ) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """Return the gradients of a microbatch's inputs, and its weight backward as a function."""
        arrived: list[Leaves] = []
        grads: Any = None
        if flight.loss is not None:
            grads = self.losses.seed(mb, flight.loss)
        else:
            grads, arrived = self._take_gradients(task, flight)
        if self.observer is not UNWATCHED:
            self.observer.memory.arrived(task.needs, arrived)
        if grads is None:
            return (None,) * len(flight.passage.inputs), do_nothing
        if flight.loss is None and self.observer is UNWATCHED:
            return flight.passage.backward(grads)
        with self.observer.memory.watching(stage, ()) as note:
            result = self._run_passage(mb, flight, grads)
            note(flight.passage.held)
        return result

    def _run_passage(
        self, mb: MicrobatchId, flight: InFlight, grads: Any
    ) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        if flight.loss is not None and not self.losses.counts(mb):
            # The mean of no values is NaN, and zero times its gradient is not zero.
            return flight.passage.backward_of_nothing()
        return flight.passage.backward(grads, flight.loss)

    def _take_gradients(self, task: Task, flight: InFlight) -> tuple[Any, list[Leaves]]:
        """Return the gradients of a microbatch's outputs: nested like them, and by message.

        The former is None if none has arrived.
        """
        arguments: tuple[Any, ...] = ()
        rows: list[Leaves] = []
        are_missing = True
        for message, (leaves, structure) in zip(task.needs, flight.outputs, strict=True):
            grads = self._take_gradient(message, leaves)
            are_missing = are_missing and _NONE.issuperset(map(type, grads))
            rows.append(grads)
            arguments += unflatten(grads, structure)
        return None if are_missing else as_outputs(arguments, flight.passage.outputs), rows

    def _take_gradient(self, message: Message, outputs: Leaves) -> list[Tensor | None]:
        """Return the gradient of each output; None for those that need none or were not used."""
        made = self._made.pop(message, None)
        grads: list[Tensor | None]
        if made is not None:
            grads = made[0]
        else:
            form, tensors = self._receive(message)
            if form.are_plain:
                grads = cast(list[Tensor | None], tensors)
            else:
                needing = list(filter(needs_grad, outputs))
                grads = rebuild_gradients(
                    self.stages[message.taker], message, form, tensors, needing
                )
        if len(grads) == len(outputs):  # All of them need one.
            return grads
        arriving = iter(grads)
        return [next(arriving) if needs_grad(output) else None for output in outputs]

    def _backward_weight(self, task: Task, stage: PipelineStage, mb: MicrobatchId) -> None:
        pending = self._pending.pop((stage.stage_index, mb))
        if task.completes_grads and self.settings.is_final:
            stage.expect_last_grads()
        self.observer.memory.arrived((), ())
        self._add_grads(task, stage, pending)

    def _add_grads(self, task: Task, stage: PipelineStage, pending: WeightBackward) -> None:
        with self.observer.memory.watching(stage, ()):
            pending()
        stage.accumulate_grads()
        if task.completes_grads and not stage.is_sharded:  # Otherwise they are not reduced yet.
            self._complete(stage)

    def _complete(self, stage: PipelineStage) -> None:
        if not self.settings.is_final:
            return
        stage.reduce_late_grads()
        if self.tied is not None and stage.stage_index in self.tied.stages:
            self._awaiting_others.append(stage)
        elif self.settings.on_grads_ready is not None:
            stage.finish_reduction()
            self.settings.on_grads_ready(stage)

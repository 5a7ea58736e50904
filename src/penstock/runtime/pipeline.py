"""The pipeline: stages, a schedule, and the steps that they run."""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from penstock import schedules
from penstock.comm import AbstractComm, LocalGroup, ProcessGroupComm, check_agreement
from penstock.errors import CommError, StageError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    SendActivation,
    SendGradient,
)
from penstock.ir.action import COMPUTE_TYPES, compute_parts, parts
from penstock.microbatch import merge_chunks, split_args_kwargs_into_chunks, split_target
from penstock.runtime.messages import Form
from penstock.runtime.program import forward_only, make_program
from penstock.runtime.routes import Key, RankSkips, check_skips
from penstock.runtime.step import Batch, CustomFunction, LossFn, Settings, Step
from penstock.runtime.tied import TiedGrads, Ties, claim, tie
from penstock.runtime.wire import Wire
from penstock.stage import PipelineStage

DEFAULT_TIMEOUT_S = 600.0
_LONGEST_TIMEOUT_S = 365 * 24 * 3600


class Pipeline:
    """Runs steps of any schedule over the stages that this rank holds.

    `schedule` is a Schedule, or the name of one (see `penstock.schedules.names()`), which needs
    `n_microbatches` too. The gradients of a step are the sum over its microbatches, or the mean
    if `scale_grads`. Without a `loss_fn` there is no backward. `on_grads_ready(stage)` is called
    once per step and stage, as soon as the stage's gradients are complete; where parameters are
    tied to those of other stages, that is at the end of the step.

    No wait lasts longer than `timeout` seconds. If any rank fails, all of them raise.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        schedule: Schedule | str,
        *,
        n_microbatches: int | None = None,
        loss_fn: LossFn | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        on_grads_ready: Callable[[PipelineStage], None] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        held = list(stages) if isinstance(stages, Sequence) else [stages]
        _check_stages(held)
        self.schedule = _as_schedule(schedule, held, n_microbatches)
        _check_fit(self.schedule, held)
        self.stages = {stage.stage_index: stage for stage in held}
        self._first = held[0]
        self._specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        self._timeout_s = _check_timeout(timeout)
        self._settings = Settings(
            loss_fn, scale_grads, on_grads_ready or _ignore, custom_functions={}
        )
        rank = held[0].group_rank
        self._skips = RankSkips.of(held)
        self._forward_program = make_program(
            forward_only(self.schedule), rank, skips=self._skips.all
        )
        self._program = make_program(
            self.schedule, rank, whole=self._compiled_stages(), skips=self._skips.all
        )
        self._has_backward = loss_fn is not None and any(
            not isinstance(part, Forward)
            for action in self.schedule.orders[rank]
            for part in compute_parts(action)
        )
        self._forms: dict[bool, dict[Key, Form]] = {True: {}, False: {}}
        self._comm: AbstractComm | None = None
        self._is_dynamic = False
        self._ties = Ties({}, {}, frozenset())
        self._failure = ""

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One batch, forward and backward; returns the outputs on the rank of the last stage.

        `args` are for the first stage, `kwargs` for the stages of this rank, `target` for the
        last stage; ranks that do not hold it need not give it. All are cut into microbatches.
        `losses` is filled with the loss of each microbatch, `loss_kwargs` go to `loss_fn` whole.
        """
        return self._run(
            self._has_backward, args, kwargs, target, losses, return_outputs, loss_kwargs
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One batch, forward only and without gradients; takes and returns what `step` does.

        Losses are computed only if `losses` is given, so that outputs need no `target`.
        """
        return self._run(False, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def step_microbatches(
        self,
        args: list[tuple[Any, ...]] | None = None,
        kwargs: list[dict[str, Any]] | None = None,
        *,
        targets: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> list[Any] | None:
        """As `step`, for a batch that comes already cut; the outputs are not merged either."""
        with self._failing_together():
            batch = Batch(
                self._check_microbatches("args", args, tuple),
                self._check_microbatches("kwargs", kwargs, dict),
                [] if targets is None else self._check_microbatches("targets", targets, object),
                loss_kwargs or {},
            )
            return self._run_batch(batch, self._has_backward, losses, return_outputs)

    def close(self) -> None:
        """End the connections to other ranks now; otherwise they end with the last reference."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None
        self._failure = self._failure or "it was closed"

    def register_custom_function(self, kind: type[Action], function: CustomFunction) -> None:
        """Call `function(action, context)` in place of running each action of a kind.

        `context.run(action)` runs it, or one half of an overlap, and must be called;
        `context.stages` and `context.batch` are what the step works on. The halves of an overlap
        are not of their own kinds, and a compiled stage runs Backward where others run
        BackwardInput.
        """
        if kind not in COMPUTE_TYPES:
            names = ", ".join(known.__name__ for known in COMPUTE_TYPES)
            raise StageError(f"kind is {kind!r}. Expected one of penstock.ir's {names}.")
        functions = {**self._settings.custom_functions, kind: function}
        self._settings = replace(self._settings, custom_functions=functions)

    def _run(
        self,
        has_backward: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> Any:
        args_spec, kwargs_spec, merge_spec = self._specs
        with self._failing_together():
            args_split, kwargs_split = split_args_kwargs_into_chunks(
                args if 0 in self.stages else (),
                kwargs,
                self.num_microbatches,
                args_spec if 0 in self.stages else None,
                kwargs_spec if kwargs else None,
            )
            targets: list[Any] = []
            if target is not None and self._holds_last:
                targets = split_target(target, self.num_microbatches)
            batch = Batch(args_split, kwargs_split, targets, loss_kwargs or {})
            outputs = self._run_batch(batch, has_backward, losses, return_outputs)
            return None if outputs is None else merge_chunks(outputs, merge_spec)

    def _run_batch(
        self, batch: Batch, has_backward: bool, losses: list[Any] | None, return_outputs: bool
    ) -> list[Any] | None:
        assert self._comm is not None
        if has_backward and not torch.is_grad_enabled():
            raise StageError(
                "step() was called where gradients are disabled, so there would be no backward. "
                "Call it outside of torch.no_grad(), or call eval()."
            )
        program = self._program if has_backward else self._forward_program
        forms = {} if self._is_dynamic else self._forms[has_backward]
        keeps_outputs = return_outputs and self._holds_last
        wire = Wire(self._comm, program, self._first.device, forms)
        is_tied = has_backward and self._ties.stages
        step = Step(
            program=program,
            stages=self.stages,
            wire=wire,
            batch=batch,
            settings=self._settings,
            has_backward=has_backward,
            keeps_outputs=keeps_outputs,
            needs_losses=has_backward or losses is not None,
            tied=TiedGrads(self._ties, self.stages, self._comm) if is_tied else None,
        )
        try:
            step.run_all()
        except BaseException as error:
            if step.tied is not None:
                step.tied.put_back()
            if step.current is not None:
                error.add_note(f"in {_describe(step.current)}, on rank {program.rank}")
            raise
        if losses is not None:
            found = [step.losses[mb] for mb in sorted(step.losses)]
            losses[:] = [x.detach() if isinstance(x, torch.Tensor) else x for x in found]
        return [step.outputs[mb] for mb in sorted(step.outputs)] if keeps_outputs else None

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Whatever is raised in here ends the step on all ranks."""
        if self._failure:
            raise CommError(
                f"rank {self._first.group_rank}: this pipeline is at its end ({self._failure}). "
                "Make a new pipeline on all ranks."
            )
        try:
            if self._comm is None:
                self._connect()
            yield
        except BaseException as error:
            notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
            self._failure = f"{type(error).__name__}: {error}{notes}"
            if self._comm is not None:
                self._comm.fail(self._failure)
                self._comm = None
            raise

    def _connect(self) -> None:
        """Open the channels, and make sure that all ranks have the same pipeline in mind."""
        group = self._first.group
        if isinstance(group, LocalGroup):
            self._comm = group.connect()
        else:
            self._comm = ProcessGroupComm(group, self._first.device, self._timeout_s)
        digest = hashlib.sha256(self.schedule.to_csv().encode()).hexdigest()[:8]
        own = {
            "num_stages": self.schedule.num_stages,
            "n_microbatches": self.num_microbatches,
            "schedule": f"{self.schedule!r} with orders {digest}",
            "loss_fn": "none" if self._settings.loss_fn is None else "given",
            "the cut": self._first.cut or "none",
        }
        is_dynamic = any(stage.dynamic_shapes for stage in self.stages.values())
        gathered = self._comm.gather((own, is_dynamic, claim(self.stages), self._skips))
        check_agreement([values for values, _, _, _ in gathered])
        check_skips([skips for _, _, _, skips in gathered], self.schedule.placement.ranks)
        self._is_dynamic = any(dynamic for _, dynamic, _, _ in gathered)
        self._ties = tie(
            self._comm.rank,
            [claims for _, _, claims, _ in gathered],
            is_one_process=isinstance(group, LocalGroup),
        )

    @property
    def _holds_last(self) -> bool:
        return self.schedule.num_stages - 1 in self.stages

    def _check_microbatches(self, name: str, values: Any, kind: type) -> list[Any]:
        if values is None:
            return [kind() for _ in range(self.num_microbatches)]
        if not isinstance(values, list) or len(values) != self.num_microbatches:
            got = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
            raise StageError(
                f"{name} is {got}. Expected a list with one value for each of the "
                f"{self.num_microbatches} microbatches of the schedule."
            )
        for mb, value in enumerate(values):
            if not isinstance(value, kind):
                raise StageError(
                    f"{name}[{mb}] is a {type(value).__name__}. Expected a {kind.__name__} for "
                    "each microbatch: what the stage is called with."
                )
        return values

    def _compiled_stages(self) -> set[int]:
        """The stages whose backward is to be split and cannot be; warns of them."""
        split = {
            part.stage
            for order in self.schedule.orders
            for action in order
            for part in compute_parts(action)
            if isinstance(part, BackwardInput)
        }
        compiled = {index for index, stage in self.stages.items() if stage.is_compiled} & split
        for index in sorted(compiled):
            warnings.warn(
                f"stage {index} is compiled, and the backward of a compiled module cannot be split "
                "yet: it runs full backwards, and leaves the schedule's bubbles to idle.",
                stacklevel=4,
            )
        return compiled


def _ignore(stage: PipelineStage) -> None:
    """What happens when a stage's gradients are ready, unless the user asks for more."""


def _describe(action: Action) -> str:
    """An action in words: 0F3 (forward of microbatch 3 on stage 0)."""
    words = {
        Forward: "forward",
        Backward: "backward",
        BackwardInput: "input backward",
        BackwardWeight: "weight backward",
        SendActivation: "sending the activation",
        SendGradient: "sending the gradient",
    }
    described = " and ".join(
        f"{words[type(part)]} of microbatch {part.mb} on stage {part.stage}"
        for part in parts(action)
    )
    return f"{action} ({described})"


def _as_schedule(
    schedule: Schedule | str, stages: list[PipelineStage], n_microbatches: int | None
) -> Schedule:
    if isinstance(schedule, str):
        if n_microbatches is None:
            raise StageError(
                f"schedule is the name {schedule!r}, which does not say how many microbatches. "
                "Give n_microbatches too, or a Schedule."
            )
        generator = schedules.get(schedule)
        return generator(
            num_ranks=stages[0].group_size,
            num_microbatches=n_microbatches,
            stages_per_rank=len(stages),
        )
    if not isinstance(schedule, Schedule):
        raise StageError(
            f"schedule is {schedule!r}. Expected a penstock.Schedule, or the name of one with "
            "n_microbatches."
        )
    if n_microbatches not in (None, schedule.num_microbatches):
        raise StageError(
            f"n_microbatches is {n_microbatches}, but the schedule has "
            f"{schedule.num_microbatches}. Leave it out, or make the schedule for as many."
        )
    schedule.verify()
    return schedule


def _check_timeout(timeout: float) -> float:
    if not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST_TIMEOUT_S:
        raise StageError(
            f"timeout is {timeout!r}. Expected seconds, more than 0 and at most a year."
        )
    return float(timeout)


def _check_stages(stages: list[PipelineStage]) -> None:
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise StageError(
                f"stages holds a {type(stage).__name__}. Expected penstock.PipelineStage: import "
                "the stage from penstock too."
            )
    if not stages:
        raise StageError("stages is empty. Give the stages that this rank holds.")
    for name in ("num_stages", "group", "device", "cut"):
        found = {str(getattr(stage, name)) or "none" for stage in stages}
        if len(found) > 1:
            raise StageError(
                f"the stages of one rank differ in {name}: {', '.join(sorted(found))}. "
                "Give all of them the same."
            )


def _check_fit(schedule: Schedule, stages: list[PipelineStage]) -> None:
    rank, num_ranks = stages[0].group_rank, stages[0].group_size
    if num_ranks != schedule.num_ranks:
        raise StageError(
            f"the schedule is for {schedule.num_ranks} ranks, but the group has {num_ranks}. "
            "Make it for as many as there are, or give the stages another group."
        )
    if stages[0].num_stages != schedule.num_stages:
        raise StageError(
            f"the schedule has {schedule.num_stages} stages, but the stages say that num_stages "
            f"is {stages[0].num_stages}. Cut the model into {schedule.num_stages}."
        )
    held = sorted(stage.stage_index for stage in stages)
    expected = list(schedule.placement.stages_of(rank))
    if held != expected:
        raise StageError(
            f"rank {rank} was given stages {held}, but the schedule places {expected} there. "
            f"Give it those: schedule.placement.stages_of({rank})."
        )

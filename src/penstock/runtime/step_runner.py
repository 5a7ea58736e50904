"""Run the steps of a pipeline: with their programs and observers, and the next schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.comm import AbstractComm, LocalGroup, check_agreement
from penstock.errors import StageError
from penstock.ir import Message, Rank, Schedule, Skip, StageId
from penstock.ir.action import in_words
from penstock.microbatches.loss_weights import LossWeights
from penstock.passes.local_proof import has_stamps
from penstock.runtime.auto.auto_pilot import AutoPilot
from penstock.runtime.auto.given_schedule_watch import GivenScheduleWatch
from penstock.runtime.auto.pilot import AbstractPilot, gathered_placement
from penstock.runtime.bad_values.value_guard import ValueGuard
from penstock.runtime.losses import Losses
from penstock.runtime.measuring.action_bytes import ActionBytes
from penstock.runtime.measuring.action_times import Meter
from penstock.runtime.measuring.observer import UNWATCHED, Observer
from penstock.runtime.measuring.profiler_ranges import ProfilerRanges
from penstock.runtime.messages.foreseen_forms import foresee_forms
from penstock.runtime.messages.forms import Form
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.pipeline_checks import (
    check_replicas,
    check_shared_modules,
    check_slow_when,
    check_wrapped_early,
)
from penstock.runtime.rank_facts import (
    RankFacts,
    RankSkips,
    check_skips,
    describe_part,
    describe_whole,
    digest_orders,
    have_same_orders,
)
from penstock.runtime.rank_programs import Programs
from penstock.runtime.recording.recorder import Recorder
from penstock.runtime.step import Step
from penstock.runtime.step_settings import Batch, Settings
from penstock.runtime.tied_parameters import TiedGrads, Ties, check_no_grads, tie
from penstock.stage import PipelineStage
from penstock.torch_private import is_profiling


class StepRunner:
    """The state that steps of one pipeline share: programs, forms of messages, ties.

    `plan` is the schedule of all steps, or a pilot that chooses the schedule of each. `check_peers`
    is called before the first step with a backward, which pipelines with common collectives run
    together.
    """

    def __init__(
        self,
        stages: Mapping[StageId, PipelineStage],
        plan: Schedule | AbstractPilot,
        num_microbatches: int,
        *,
        has_backward: bool,
        check_peers: Callable[[], None],
        guard: ValueGuard | None = None,
        slow_when: float | None = None,
    ) -> None:
        self._stages = stages
        self._guard = guard
        self._check_peers = check_peers
        self._are_peers_checked = False
        self._first = next(iter(stages.values()))
        self._num_microbatches = num_microbatches
        self._has_backward = has_backward
        self._forms: dict[bool, dict[Message, Form]] = {True: {}, False: {}}
        self._is_dynamic = False
        self._ties = Ties({}, {}, frozenset())
        self._are_grads_open = False
        """True if the last step with a backward left gradients for a later one to complete."""
        self._reduced: frozenset[StageId] | None = None
        """The stages with replicas when all ranks met."""
        self._skips: frozenset[Skip] = frozenset()
        """The skips of all ranks, once they have met."""
        self._schedule: Schedule | None = None
        self._programs: Programs | None = None
        self._checked: list[int] = []
        """The stages' `num_changes` for which the programs were made and all was checked."""
        self._pilot = plan if isinstance(plan, AbstractPilot) else None
        self._slow_when = check_slow_when(slow_when, plan, has_backward=has_backward)
        self._watch = (
            None if slow_when is None else GivenScheduleWatch(slow_when, self._first.device)
        )
        if isinstance(plan, Schedule):
            self._use(plan)

    @property
    def schedule(self) -> Schedule:
        """The schedule that the next step runs."""
        if self._schedule is None:
            raise StageError(
                "the schedule is not known yet: it depends on the stages of all ranks, which "
                "meet in the first step. Ask for it after that."
            )
        return self._schedule

    @property
    def stage_times(self) -> dict[StageId, float]:
        """The seconds that each stage of this rank takes in a step; empty if not measured yet."""
        pilot = self._pilot
        watch = pilot.watch if isinstance(pilot, AutoPilot) and self._schedule else None
        if self._watch is not None:
            watch = self._watch.watch
        return {} if watch is None else watch.stage_times(self._first.group_rank)

    @property
    def are_grads_open(self) -> bool:
        """True if the last step left gradients for a later one to complete."""
        return self._are_grads_open

    def facts(self, named: dict[str, Any]) -> RankFacts:
        """Return the facts of this rank; the schedule is added to the named ones."""
        orders: dict[Rank, str] = {}
        if self._pilot is not None:
            described = self._pilot.options
        elif has_stamps(self.schedule):
            skips = RankSkips.of(self._stages.values()).all
            orders = digest_orders(self.schedule, self._first.group_rank, skips)
            described = describe_part(self.schedule)
        else:
            described = describe_whole(self.schedule)
        agreed = {**named, "schedule": described, "slow_when": self._slow_when}
        return RankFacts.of(self._stages, agreed, orders)

    def agree(self, comm: AbstractComm, ranks: Sequence[RankFacts]) -> None:
        """Raise an error unless all ranks were given the same.

        If parts of the schedule differ, or some ranks know only their part and others the whole,
        all ranks compare the whole.
        """
        comm.place.hold(self._stages)
        named = [rank.named for rank in ranks]
        descriptions = {rank.named["schedule"] for rank in ranks}
        has_parts = any(rank.orders for rank in ranks)
        if has_parts and (len(descriptions) > 1 or not have_same_orders(ranks)):
            whole = (
                self._pilot.options if self._pilot is not None else describe_whole(self.schedule)
            )
            texts = comm.gather(whole)
            named = [{**one, "schedule": text} for one, text in zip(named, texts, strict=True)]
            check_agreement(named)
            self.schedule.verify()  # What others proved by stamps need not hold for ours.
        else:
            check_agreement(named)

    def meet(self, comm: AbstractComm, ranks: Sequence[RankFacts]) -> None:
        """Learn what the other ranks were given, and open the channels to them."""
        if self._pilot is not None:
            placement = gathered_placement([rank.held for rank in ranks], self._first.num_stages)
            self._use(
                self._pilot.start(comm, self._first.device, placement, self._num_microbatches)
            )
        self._checked = []  # Without what the other ranks were given.
        self._reduced = self._stages_with_replicas()
        self._skips = check_skips([rank.skips for rank in ranks], self.schedule)
        self._is_dynamic = any(rank.is_dynamic for rank in ranks)
        self._ties = tie(
            comm.rank,
            [rank.claims for rank in ranks],
            is_one_process=isinstance(self._first.group, LocalGroup),
        )
        comm.open(self._refresh().training.channels | self._ties.channels_of(comm.rank))

    def run(
        self,
        comm: AbstractComm,
        batch: Batch,
        settings: Settings,
        loss_weights: LossWeights,
        *,
        has_backward: bool,
        keeps_outputs: bool,
        needs_losses: bool,
        recorders: Sequence[Recorder],
    ) -> Step:
        """Run one batch; return the step with its outputs and losses."""
        programs = self._refresh()
        if has_backward and not comm.is_dry:
            self._check_peers_once()
        program = programs.training if has_backward else programs.forward
        forms = {} if self._is_dynamic else self._forms[has_backward]
        pilot = self._pilot if has_backward else None
        if comm.is_dry and not forms:
            foreseen = None if pilot is None else pilot.foresee()
            if foreseen is None:
                foreseen = foresee_forms(program, self._stages, has_backward=has_backward)
            forms.update(foreseen)
        watch = self._watch if has_backward else None
        observer = self._make_observer(pilot or watch, recorders, has_backward=has_backward)
        guard = self._guard if has_backward and not comm.is_dry else None
        if guard is not None:
            observer = guard.watched(observer)
        tied = self._tied_grads(comm, settings) if has_backward and self._ties.stages else None
        step = Step(
            program=program,
            stages=self._stages,
            mailbox=Mailbox(
                comm,
                program,
                self._first.device,
                forms,
                observer.clock,
                is_dynamic=self._is_dynamic,
            ),
            batch=batch,
            settings=settings,
            losses=Losses(
                settings.loss_fn,
                batch,
                loss_weights,
                has_backward,
                adds_losses=settings.adds_losses,
            ),
            has_backward=has_backward,
            keeps_outputs=keeps_outputs,
            needs_losses=needs_losses,
            tied=tied,
            observer=observer,
            place=comm.place,
        )
        _run_all(step, guard)
        if has_backward:
            self._are_grads_open = not settings.is_final
        if guard is not None:
            guard.settle(comm, is_final=settings.is_final)
        for recorder in recorders:
            recorder.take(observer, self.schedule)
        if watch is not None:
            watch.end_step(observer, self.schedule, comm, forms, batch.work)
        if pilot is not None:
            following = pilot.end_step(observer, forms, batch.work)
            if following != self._schedule:
                self._use(following)
        return step

    def _check_peers_once(self) -> None:
        if not self._are_peers_checked:
            self._check_peers()
            self._are_peers_checked = True

    def _make_observer(
        self,
        planner: AbstractPilot | GivenScheduleWatch | None,
        recorders: Sequence[Recorder],
        *,
        has_backward: bool,
    ) -> Observer:
        """Return an observer for who plans, or else for recorders, and for torch's profiler."""
        observer = UNWATCHED if planner is None else planner.make_observer()
        if observer is UNWATCHED and recorders:
            if has_backward and any(one.wants_memory(self.schedule) for one in recorders):
                observer = Observer(memory=ActionBytes(self._first.device))
            else:
                observer = Observer(Meter(self._first.device))
        return replace(observer, ranges=ProfilerRanges()) if is_profiling() else observer

    def _tied_grads(self, comm: AbstractComm, settings: Settings) -> TiedGrads | None:
        """Return what exchanges tied gradients; None in steps that leave them to a later one.

        Until then, each copy adds up its own gradients.
        """
        if settings.is_final:
            return TiedGrads(self._ties, self._stages, comm, sets_aside=not self._are_grads_open)
        if not self._are_grads_open:
            check_no_grads(self._ties, self._stages)
        return None

    def forget_forms(self) -> None:
        """Learn the forms of messages again in the next step; all ranks must do so together."""
        self._forms = {True: {}, False: {}}

    def _use(self, schedule: Schedule) -> None:
        """Run this schedule from the next step on; the known forms of messages are kept."""
        self._schedule = schedule
        self._programs = None
        self._refresh()

    def _refresh(self) -> Programs:
        """Return the programs for the stages as they are now.

        Raise an error if their gradients would be wrong.
        """
        for stage in self._stages.values():
            stage.refresh()
        if isinstance(self._pilot, AutoPilot) and not self._pilot.has_peers:
            check_replicas(list(self._stages.values()))
        changes = [stage.num_changes for stage in self._stages.values()]
        if self._programs is not None and changes == self._checked:
            return self._programs
        sharded = frozenset(i for i, stage in self._stages.items() if stage.is_sharded)
        known = self._programs
        wanted = self._skips, sharded
        if known is None or (known.skips, known.sharded) != wanted:
            self._programs = Programs(self.schedule, self._first.group_rank, *wanted)
        assert self._programs is not None
        if self._has_backward:
            for stage in self._stages.values():
                stage.check_wrappers()
            check_shared_modules(list(self._stages.values()))
            if self._reduced is not None and self._first.group_size > 1:
                check_wrapped_early(self._stages_with_replicas() - self._reduced)
        self._checked = changes
        return self._programs

    def _stages_with_replicas(self) -> frozenset[StageId]:
        return frozenset(i for i, stage in self._stages.items() if stage.is_reduced)


def abandon_step(stages: Mapping[StageId, PipelineStage], error: BaseException) -> None:
    """Shard parameters again after a failure; a fault in that must not hide the first one."""
    for index, stage in stages.items():
        try:
            stage.abandon_step()
        except Exception as another:
            error.add_note(
                f"the parameters of stage {index} could not be sharded again after it: "
                f"{type(another).__name__}: {another}"
            )


def _run_all(step: Step, guard: ValueGuard | None) -> None:
    """Run the actions of a step; an error gets a note with the one that it came in."""
    try:
        if guard is None:
            step.run_all()
        else:
            guard.run(step)
    except BaseException as error:
        if step.tied is not None:
            step.tied.put_back()
        if step.current is not None:
            error.add_note(f"in {in_words(step.current)}, on rank {step.program.rank}")
        raise

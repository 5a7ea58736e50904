"""The schedule that is found while training.

    steps    1         2 …        3 …       4 5 6 …
    run      safe      safe       safe      the best that was found
             split     split      whole
    for      memory    times      times     training; a few are timed to see what was gained

After step 3 all ranks send their measurements to rank 0. It searches, and all ranks continue with
the schedule that it found. Every step trains: only the order of its actions differs.

With replicas, or stages that are tensor parallel, several pipelines take part in common
collectives. Ranks 0 of these decide together, so that all run one schedule.
"""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.comm import AbstractComm, check_agreement
from penstock.comm.decisions import decide
from penstock.comm.pipelines_together import Peers
from penstock.costs import CostTable
from penstock.errors import ScheduleError, StageError
from penstock.ir import Message, Placement, Schedule
from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.auto.next_schedule import NextSchedule, choose_next
from penstock.runtime.auto.pilot import AbstractPilot
from penstock.runtime.auto.seen_work import SeenWork
from penstock.runtime.auto.slow_watch import DEFAULT_SHARE, LOOK_EVERY, SlowWatch, Verdict
from penstock.runtime.measuring.action_times import Meter
from penstock.runtime.measuring.measuring_steps import Measuring, Share, average, join
from penstock.runtime.measuring.observer import UNWATCHED, Observer
from penstock.runtime.measuring.slowness import Plan
from penstock.runtime.messages.forms import Form
from penstock.schedules.given_shape import is_auto
from penstock.solver.safe_schedules import safe_schedule

LOGGER = logging.getLogger("penstock")
# The number of timed steps of a new schedule; the first is left out, as it may include set-up.
_NUM_TIMED = 6


@dataclass(slots=True)
class _Following:
    """A chosen schedule that is being run, and what was measured of it."""

    chosen: NextSchedule
    watch: SlowWatch
    before_s: float
    """The measured time of a step before it."""
    timed_s: list[float] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule:
        return self.chosen.schedule


class AutoPilot(AbstractPilot):
    """A pilot that measures the first steps, searches for a schedule, and checks for drift."""

    def __init__(self, options: Auto, timeout_s: float, find_peers: Callable[[], Peers]) -> None:
        self._options = options
        self._find_peers = find_peers
        self.has_peers = False
        """True if pipelines with common collectives decide together, once ranks have met."""
        self._peers = Peers.of((), torch.device("cpu"), timeout_s)
        self._look_every = LOOK_EVERY
        # The other ranks wait for rank 0 while it searches.
        self._search_s = min(options.seconds, timeout_s / 2)

    @property
    def options(self) -> str:
        return f"auto, {self._options}"

    def start(
        self,
        comm: AbstractComm,
        device: torch.device,
        placement: Placement,
        num_microbatches: int,
    ) -> Schedule:
        self._comm, self._device = comm, device
        self._caps = self._options.caps(comm.num_ranks)
        self._peers = self._find_peers()
        same = {
            "schedule": self.options,
            "num_microbatches": num_microbatches,
            "the placement of stages": placement,
        }
        self.has_peers = decide(
            comm, device, None, lambda _: self._meet_peers(same), "the other replicas"
        )
        self._safe = safe_schedule(placement, num_microbatches)
        self._phase: Measuring | _Following = self._measure()
        return self._phase.schedule

    def make_observer(self) -> Observer:
        phase = self._phase
        if isinstance(phase, Measuring):
            return phase.make_observer()
        is_timed = len(phase.timed_s) < _NUM_TIMED or self._is_looking(phase)
        return Observer(Meter(self._device)) if is_timed else UNWATCHED

    def end_step(
        self, observer: Observer, forms: Mapping[Message, Form], work: Sequence[float]
    ) -> Schedule:
        phase = self._phase
        if isinstance(phase, Measuring):
            phase.take(observer)
            self._works.append(work)
            if phase.is_done:
                share = phase.share(self._comm, forms)
                self._phase = self._plan(share, statistics.median(phase.step_times_s))
        elif isinstance(meter := observer.clock, Meter) and self._has_drifted(
            phase, meter, forms, work
        ):
            self._look_every *= 2  # Times that keep changing are not worth a search each time.
            self._phase = self._measure(phase.schedule)
        else:
            phase.watch.num_steps += 1
        return self._phase.schedule

    @property
    def watch(self) -> SlowWatch | None:
        """The watch over the steps; None while costs are measured."""
        return None if isinstance(self._phase, Measuring) else self._phase.watch

    def _meet_peers(self, same: dict[str, Any]) -> bool:
        """Check that all pipelines with common collectives plan alike; return if there are any."""
        check_agreement(self._peers.gather(same, "the first step"), "replica")
        return bool(self._peers)

    def _measure(self, so_far: Schedule | None = None) -> Measuring:
        """Return the steps that measure costs; `so_far` is the schedule that was run before."""
        self._works: list[Sequence[float]] = []
        self._so_far = so_far
        return Measuring(
            self._safe,
            self._device,
            warm_up=1,
            repeats=self._options.measure_steps,
            recompute=self._options.recompute,
        )

    def _plan(self, share: Share, before_s: float) -> _Following:
        what = "the schedule of the next steps"
        seen = SeenWork.of(self._works)

        def choose(measured: list[tuple[CostTable, SeenWork]]) -> NextSchedule | ScheduleError:
            tables, works = zip(*measured, strict=True)
            try:
                return choose_next(
                    average(tables),
                    self._safe,
                    self._caps,
                    self._search_s,
                    recompute=self._options.recompute,
                    seen=SeenWork.of([step for work in works for step in work.steps]),
                    so_far=self._so_far,
                )
            except ScheduleError as error:
                return error  # For all ranks to raise.

        def choose_for_all(shares: list[Share]) -> tuple[NextSchedule | ScheduleError, CostTable]:
            own = join(shares)
            return self._peers.decide((own, seen), choose, what), own

        chosen, costs = decide(self._comm, self._device, share, choose_for_all, what)
        if isinstance(chosen, ScheduleError):
            raise chosen
        if self._comm.rank == 0:
            LOGGER.info("%s", chosen)
        watch = SlowWatch(
            Plan(chosen.schedule, costs, share.receipts_s),
            self._options.slow_when or DEFAULT_SHARE,
            before_s,
            seen,
            self._look_every,
            self._join_verdicts,
            is_quiet=self._options.slow_when is None,
        )
        return _Following(chosen, watch, before_s)

    def _time(self, phase: _Following, meter: Meter) -> None:
        """Time a step of a new schedule; after the last one, log how much faster steps are."""
        phase.timed_s.append(meter.ended_s - meter.began_s)
        if len(phase.timed_s) < _NUM_TIMED:
            return
        after_s = phase.watch.usual_s = statistics.median(phase.timed_s[1:])
        if phase.chosen.is_new and self._comm.rank == 0:
            LOGGER.info(
                "measured: %.2f times as fast, %.4g ms a step before and %.4g ms now",
                phase.before_s / after_s,
                phase.before_s * 1e3,
                after_s * 1e3,
            )

    def _is_looking(self, phase: _Following) -> bool:
        """Return whether the next step is compared with the plan; the same on all ranks."""
        wants = (self._options.replan_when, self._options.slow_when)
        return wants != (None, None) and phase.watch.is_looking

    def _has_drifted(
        self,
        phase: _Following,
        meter: Meter,
        forms: Mapping[Message, Form],
        work: Sequence[float],
    ) -> bool:
        """Take a timed step; return whether to measure again."""
        if len(phase.timed_s) < _NUM_TIMED:
            self._time(phase, meter)
            return False
        if not self._is_looking(phase):  # A recording times all steps.
            return False
        verdict = phase.watch.take(meter, work, self._comm, self._device, forms)
        limit = self._options.replan_when
        if limit is None or verdict is None:
            return False
        if verdict.drift <= limit and not verdict.has_slow_link:
            return False
        if self._comm.rank == 0:
            LOGGER.info("times have changed by %.0f %%: measuring again", verdict.drift * 100)
        return True

    def _join_verdicts(self, own: Verdict) -> Verdict:
        """Return a verdict for all pipelines with common collectives, each with its slow ranks."""
        shared = own.drift, own.asks_for_links, own.has_slow_link
        found = self._peers.gather(shared, "how far times have drifted")
        drift, asks, has_slow_link = map(max, zip(*found, strict=True))
        return replace(own, drift=drift, asks_for_links=asks, has_slow_link=has_slow_link)


def pilot_if_auto(
    schedule: Schedule | str | Auto | AbstractPilot,
    has_loss: bool,
    timeout_s: float,
    find_peers: Callable[[], Peers],
) -> Schedule | str | AbstractPilot:
    """Return a pilot for "auto" and for an `Auto(...)`; any other schedule as it is."""
    if is_auto(schedule):
        schedule = Auto()
    if not isinstance(schedule, Auto):
        return schedule
    if not has_loss:
        raise StageError(
            'schedule is "auto", which needs a loss_fn: without a backward there is nothing to '
            "plan. Give one, or the name of a schedule."
        )
    return AutoPilot(schedule, timeout_s, find_peers)

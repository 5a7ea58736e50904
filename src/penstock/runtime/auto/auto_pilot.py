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
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.comm import AbstractComm, check_agreement
from penstock.comm.decisions import decide
from penstock.comm.pipelines_together import Peers
from penstock.costs import CostTable
from penstock.errors import ScheduleError, StageError
from penstock.ir import Message, Placement, Schedule, StageId
from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.auto.next_schedule import NextSchedule, choose_next
from penstock.runtime.auto.pilot import AbstractPilot
from penstock.runtime.measuring.action_times import Meter
from penstock.runtime.measuring.measuring_steps import (
    Measuring,
    Share,
    average,
    join,
    receipt_s,
)
from penstock.runtime.measuring.observer import UNWATCHED, Observer
from penstock.runtime.messages.forms import Form
from penstock.schedules.given_shape import is_auto
from penstock.sim.simulator import duration
from penstock.solver.safe_schedules import safe_schedule

LOGGER = logging.getLogger("penstock")
# The number of timed steps of a new schedule; the first is left out, as it may include set-up.
_NUM_TIMED = 6
# The number of steps from one check for drifted times to the next.
_LOOK_EVERY = 16


@dataclass(slots=True)
class _Following:
    """A chosen schedule that is being run, and what was measured of it."""

    chosen: NextSchedule
    costs: CostTable
    """The costs of this pipeline; other replicas may have others."""
    receipts_s: dict[int, float]
    before_s: float
    """The measured time of a step before it."""
    num_steps: int = 0
    timed_s: list[float] = field(default_factory=list)
    num_drifted: int = 0
    """The number of the last checked steps, in a row, whose times had drifted."""

    @property
    def schedule(self) -> Schedule:
        return self.chosen.schedule

    def drift(self, meter: Meter) -> float:
        """Return the largest share by which the time of a stage of this rank has changed."""
        found: defaultdict[StageId, float] = defaultdict(float)
        planned: defaultdict[StageId, float] = defaultdict(float)
        for action, timing in meter.timings.items():
            found[action.stage] += timing.cost_s(receipt_s(action, self.receipts_s))
            planned[action.stage] += duration(action, self.costs)
        return max(abs(found[stage] / planned[stage] - 1) for stage in found)


class AutoPilot(AbstractPilot):
    """A pilot that measures the first steps, searches for a schedule, and checks for drift."""

    def __init__(self, options: Auto, timeout_s: float, find_peers: Callable[[], Peers]) -> None:
        self._options = options
        self._find_peers = find_peers
        self.has_peers = False
        """True if pipelines with common collectives decide together, once ranks have met."""
        self._peers = Peers.of((), torch.device("cpu"), timeout_s)
        self._look_every = _LOOK_EVERY
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
        is_timed = phase.num_steps < _NUM_TIMED or self._is_looking(phase)
        return Observer(Meter(self._device)) if is_timed else UNWATCHED

    def end_step(self, observer: Observer, forms: Mapping[Message, Form]) -> Schedule:
        phase = self._phase
        if isinstance(phase, Measuring):
            phase.take(observer)
            if phase.is_done:
                share = phase.share(self._comm, forms)
                self._phase = self._plan(share, statistics.median(phase.step_times_s))
        elif not isinstance(meter := observer.clock, Meter):
            phase.num_steps += 1
        elif self._has_drifted(phase, meter):
            self._look_every *= 2  # Times that keep changing are not worth a search each time.
            self._phase = self._measure()
        else:
            phase.num_steps += 1
            self._time(phase, meter)
        return self._phase.schedule

    def _meet_peers(self, same: dict[str, Any]) -> bool:
        """Check that all pipelines with common collectives plan alike; return if there are any."""
        check_agreement(self._peers.gather(same, "the first step"), "replica")
        return bool(self._peers)

    def _measure(self) -> Measuring:
        return Measuring(
            self._safe,
            self._device,
            warm_up=1,
            repeats=self._options.measure_steps,
            recompute=self._options.recompute,
        )

    def _plan(self, share: Share, before_s: float) -> _Following:
        what = "the schedule of the next steps"

        def choose(tables: list[CostTable]) -> NextSchedule | ScheduleError:
            try:
                return choose_next(
                    average(tables),
                    self._safe,
                    self._caps,
                    self._search_s,
                    recompute=self._options.recompute,
                )
            except ScheduleError as error:
                return error  # For all ranks to raise.

        def choose_for_all(shares: list[Share]) -> tuple[NextSchedule | ScheduleError, CostTable]:
            own = join(shares)
            return self._peers.decide(own, choose, what), own

        chosen, costs = decide(self._comm, self._device, share, choose_for_all, what)
        if isinstance(chosen, ScheduleError):
            raise chosen
        if self._comm.rank == 0:
            LOGGER.info("%s", chosen)
        return _Following(chosen, costs, share.receipts_s, before_s)

    def _time(self, phase: _Following, meter: Meter) -> None:
        """Time a step of a new schedule; after the last one, log how much faster steps are."""
        if phase.num_steps > _NUM_TIMED:
            return
        phase.timed_s.append(meter.ended_s - meter.began_s)
        if phase.num_steps == _NUM_TIMED and phase.chosen.is_new and self._comm.rank == 0:
            after_s = statistics.median(phase.timed_s[1:])
            LOGGER.info(
                "measured: %.2f times as fast, %.4g ms a step before and %.4g ms now",
                phase.before_s / after_s,
                phase.before_s * 1e3,
                after_s * 1e3,
            )

    def _is_looking(self, phase: _Following) -> bool:
        """Return whether the next step is checked for drift; the same on all ranks."""
        if self._options.replan_when is None or phase.num_steps < _NUM_TIMED:
            return False
        return phase.num_drifted > 0 or phase.num_steps % self._look_every == 0

    def _has_drifted(self, phase: _Following, meter: Meter) -> bool:
        """Return whether to measure again: drift may be chance once, but not twice in a row."""
        limit = self._options.replan_when
        if limit is None or not self._is_looking(phase):
            return False
        what = "how far times have drifted"

        def choose(drifts: list[float]) -> float:
            return max(self._peers.gather(max(drifts), what))

        drift = decide(self._comm, self._device, phase.drift(meter), choose, what)
        phase.num_drifted = phase.num_drifted + 1 if drift > limit else 0
        if phase.num_drifted < 2:
            return False
        if self._comm.rank == 0:
            LOGGER.info("times have changed by %.0f %%: measuring again", drift * 100)
        return True


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

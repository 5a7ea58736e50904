"""The schedule that is found while training.

    steps    1         2 …        3 …       4 5 6 …
    run      safe      safe       safe      the best that was found
             split     split      whole
    for      memory    times      times     training; a few are timed to see what was gained

After step 3 all ranks send rank 0 what they measured, it searches, and all go on with what it
found. Every step trains: only the order of its actions differs.
"""

import logging
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from penstock.comm import AbstractComm
from penstock.comm.decisions import decide
from penstock.errors import ScheduleError
from penstock.ir import Message, Placement, Schedule, StageId
from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.auto.next_schedule import NextSchedule, choose_next
from penstock.runtime.auto.pilot import AbstractPilot
from penstock.runtime.measuring.action_times import Meter
from penstock.runtime.measuring.measuring_steps import Measuring, Share, join, receipt_s
from penstock.runtime.measuring.observer import UNWATCHED, Observer
from penstock.runtime.messages.forms import Form
from penstock.sim.simulator import duration
from penstock.solver.safe_schedules import safe_schedule

LOGGER = logging.getLogger("penstock")
# How many steps of a new schedule are timed; the first is left out, as it may have to set up.
_NUM_TIMED = 6
# Every how many steps it is looked whether times have drifted.
_LOOK_EVERY = 16


@dataclass(slots=True)
class _Following:
    """A plan that is being run, and what was seen of it."""

    chosen: NextSchedule
    receipts_s: dict[int, float]
    before_s: float
    """What a step took before it, by measure."""
    num_steps: int = 0
    timed_s: list[float] = field(default_factory=list)
    num_drifted: int = 0
    """In how many of the last steps that were looked at times had drifted."""

    @property
    def schedule(self) -> Schedule:
        return self.chosen.schedule

    def drift(self, meter: Meter) -> float:
        """By which share the time of a stage of this rank differs from what was planned with."""
        found: defaultdict[StageId, float] = defaultdict(float)
        planned: defaultdict[StageId, float] = defaultdict(float)
        for action, timing in meter.timings.items():
            found[action.stage] += timing.cost_s(receipt_s(action, self.receipts_s))
            planned[action.stage] += duration(action, self.chosen.costs)
        return max(abs(found[stage] / planned[stage] - 1) for stage in found)


class AutoPilot(AbstractPilot):
    """Measures the first steps, plans, and looks after the plan."""

    def __init__(self, options: Auto, timeout_s: float) -> None:
        self._options = options
        self._look_every = _LOOK_EVERY
        # The others wait for rank 0 while it searches.
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
            self._look_every *= 2  # Times that never rest are not worth a search each time.
            self._phase = self._measure()
        else:
            phase.num_steps += 1
            self._time(phase, meter)
        return self._phase.schedule

    def _measure(self) -> Measuring:
        repeats = self._options.measure_steps
        return Measuring(self._safe, self._device, warm_up=1, repeats=repeats)

    def _plan(self, share: Share, before_s: float) -> _Following:
        def choose(shares: list[Share]) -> NextSchedule | ScheduleError:
            try:
                return choose_next(join(shares), self._safe, self._caps, self._search_s)
            except ScheduleError as error:
                return error  # For all ranks to raise.

        chosen = decide(self._comm, self._device, share, choose, "the schedule of the next steps")
        if isinstance(chosen, ScheduleError):
            raise chosen
        if self._comm.rank == 0:
            LOGGER.info("%s", chosen)
        return _Following(chosen, share.receipts_s, before_s)

    def _time(self, phase: _Following, meter: Meter) -> None:
        """See what the plan has gained, and tell it once."""
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
        """Whether the next step is one in which drift is looked for; the same on all ranks."""
        if self._options.replan_when is None or phase.num_steps < _NUM_TIMED:
            return False
        return phase.num_drifted > 0 or phase.num_steps % self._look_every == 0

    def _has_drifted(self, phase: _Following, meter: Meter) -> bool:
        """Whether it is time to plan again: once may be by chance, twice is not."""
        limit = self._options.replan_when
        if limit is None or not self._is_looking(phase):
            return False
        drift = decide(
            self._comm, self._device, phase.drift(meter), max, "how far times have drifted"
        )
        phase.num_drifted = phase.num_drifted + 1 if drift > limit else 0
        if phase.num_drifted < 2:
            return False
        if self._comm.rank == 0:
            LOGGER.info("times have changed by %.0f %%: measuring again", drift * 100)
        return True

"""The best schedule and bound that the exact solver has found so far."""

import time
from collections.abc import Callable
from typing import NamedTuple

from penstock.ir import Schedule
from penstock.sim import simulate
from penstock.solver.problem import Problem
from penstock.timeline import Report


class ExactProgress(NamedTuple):
    """The progress of the solver: times in the unit of the costs, and its own time in seconds."""

    best: float
    lower_bound: float
    seconds: float


class Incumbent:
    """The best schedule and bound so far; `progress` is called when either improves."""

    def __init__(
        self,
        first: Report,
        problem: Problem,
        progress: Callable[[ExactProgress], None] | None,
    ) -> None:
        self.report = first
        self.lower_bound = 0.0
        self.is_restricted = False
        """True while only some schedules are searched, whose bounds are not those of all."""
        self._problem = problem
        self._progress = progress
        self._began = time.monotonic()

    @property
    def schedule(self) -> Schedule:
        return self.report.timeline.schedule

    @property
    def time(self) -> float:
        """The time of the best schedule, by the problem's clock."""
        return self._problem.time_of(self.report)

    @property
    def seconds(self) -> float:
        """The time since the search began."""
        return time.monotonic() - self._began

    def offer(self, schedule: Schedule) -> None:
        """Keep a schedule if it is better and within the caps."""
        report = simulate(schedule, self._problem.costs)
        is_better = self._problem.time_of(report) < self.time
        if is_better and self._problem.find_excess(report) is None:
            self.report = report
            self._tell()

    def raise_bound(self, bound: float) -> None:
        """Keep a bound if it is better, and holds for all schedules."""
        if bound > self.lower_bound and not self.is_restricted:
            self.lower_bound = bound
            self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(ExactProgress(self.time, self.lower_bound, self.seconds))

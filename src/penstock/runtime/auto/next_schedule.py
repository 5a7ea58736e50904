"""A better schedule for measured costs, if there is one, and its expected gain."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from penstock.costs import CostTable
from penstock.ir import Schedule
from penstock.runtime.auto.seen_work import UNKNOWN, SeenWork
from penstock.sim import simulate
from penstock.solver import search
from penstock.solver.problem_checks import RecomputeChoice
from penstock.solver.safe_schedules import can_run


@dataclass(frozen=True, slots=True)
class Outlook:
    """The simulated time, bubble rate and memory of a schedule."""

    step_s: float
    bubble: float
    peak_memory: float

    @classmethod
    def of(cls, schedule: Schedule, costs: CostTable) -> "Outlook":
        report = simulate(schedule, costs)
        return cls(report.makespan, report.bubble_by_makespan, report.peak_memory)

    def __str__(self) -> str:
        return (
            f"{self.step_s * 1e3:.4g} ms a step, bubble {self.bubble:.1%}, "
            f"memory {_in_words(self.peak_memory)}"
        )


@dataclass(frozen=True, slots=True)
class NextSchedule:
    """The schedule that ranks continue with, and the costs that it was chosen by."""

    schedule: Schedule
    costs: CostTable
    before: Outlook
    after: Outlook
    is_new: bool
    gap: float
    """The share by which the found schedule is slower than the proven lower bound."""
    seen: SeenWork = UNKNOWN
    """The work of the microbatches that it was chosen for."""
    is_again: bool = False
    """True if `before` is a schedule that was planned, and not that of the first steps."""

    def __str__(self) -> str:
        if not self.is_new:
            return f"kept the schedule: found none that is faster{self._of_work} ({self.before})"
        gain = self.before.step_s / self.after.step_s
        earlier = "the schedule so far" if self.is_again else "the first steps"
        return (
            f"changed the schedule: expected to be {gain:.2f} times as fast as {earlier}, "
            f"within {self.gap:.1%} of the lower bound{self._of_work}\n"
            f"  before: {self.before}\n"
            f"  after:  {self.after}"
        )

    @property
    def _of_work(self) -> str:
        if not self.seen.differing:
            return ""
        shares = [work / self.seen.usual for step in self.seen.differing for work in step]
        return f", for microbatches of {min(shares):.2g} to {max(shares):.2g} times the median work"


def choose_next(
    costs: CostTable,
    safe: Schedule,
    memory: Sequence[float] | None,
    seconds: float,
    *,
    recompute: RecomputeChoice = "auto",
    seen: SeenWork = UNKNOWN,
    so_far: Schedule | None = None,
) -> NextSchedule:
    """Return the fastest schedule that fits, or the one so far if it is as fast.

    That is the planned one that was run until now, or else `safe`.

    If microbatches differ, schedules for the mean step are searched too, and the one is taken with
    which the steps that were seen take least in the mean. Raise an error if none fits.
    """
    placement = safe.placement
    typical = seen.apply(costs, seen.mean)
    tables = [costs, typical] if seen.differing else [costs]
    results = [
        search(
            table,
            placement.num_ranks,
            safe.num_microbatches,
            memory=memory,
            placements=[placement],
            seconds=seconds / len(tables),
            recompute=recompute,
        )
        for table in tables
    ]
    steps = [seen.apply(costs, work) for work in seen.differing] or [costs]
    found = min((result.schedule for result in results), key=lambda one: _mean_s(one, steps))
    found.verify(costs=costs, memory=memory)
    current = safe if so_far is None else so_far
    before, after = Outlook.of(current, typical), Outlook.of(found, typical)
    bound = results[-1].lower_bound
    gap = max(after.step_s / bound - 1, 0.0) if bound > 0 else results[-1].gap
    is_new = _mean_s(found, steps) < _mean_s(current, steps) or not can_run(current, costs, memory)
    chosen, expected = (found, after) if is_new else (current, before)
    return NextSchedule(
        chosen, costs, before, expected, is_new, gap, seen, is_again=so_far is not None
    )


def _mean_s(schedule: Schedule, steps: Sequence[CostTable]) -> float:
    """Return the mean simulated time of steps with these costs."""
    return fmean(simulate(schedule, costs).makespan for costs in steps)


def _in_words(num_bytes: float) -> str:
    """Return bytes in the unit that gives a short number: 2.5 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}"

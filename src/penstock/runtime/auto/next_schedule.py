"""A better schedule for measured costs, if there is one, and its expected gain."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.costs import CostTable
from penstock.ir import Schedule
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

    def __str__(self) -> str:
        if not self.is_new:
            return f"kept the schedule: found none that is faster ({self.before})"
        gain = self.before.step_s / self.after.step_s
        return (
            f"changed the schedule: expected to be {gain:.2f} times as fast as the first steps, "
            f"within {self.gap:.1%} of the lower bound\n"
            f"  before: {self.before}\n"
            f"  after:  {self.after}"
        )


def choose_next(
    costs: CostTable,
    safe: Schedule,
    memory: Sequence[float] | None,
    seconds: float,
    *,
    recompute: RecomputeChoice = "auto",
) -> NextSchedule:
    """Return the fastest schedule that fits, or `safe` if it is as fast.

    Raise an error if none fits.
    """
    placement = safe.placement
    found = search(
        costs,
        placement.num_ranks,
        safe.num_microbatches,
        memory=memory,
        placements=[placement],
        seconds=seconds,
        recompute=recompute,
    )
    found.schedule.verify(costs=costs, memory=memory)
    before, after = Outlook.of(safe, costs), Outlook.of(found.schedule, costs)
    keeps = before.step_s <= after.step_s and can_run(safe, costs, memory)
    if keeps:
        return NextSchedule(safe, costs, before, before, is_new=False, gap=found.gap)
    return NextSchedule(found.schedule, costs, before, after, is_new=True, gap=found.gap)


def _in_words(num_bytes: float) -> str:
    """Return bytes in the unit that gives a short number: 2.5 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}"

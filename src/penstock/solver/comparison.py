"""Schedules for one question side by side: what `penstock compare` and the studio show."""

from dataclasses import dataclass

from penstock.costs.units import in_time
from penstock.ir import Placement, Schedule
from penstock.schedules.generator import Generator, Shape
from penstock.sim import simulate
from penstock.solver import Problem, lower_bound
from penstock.solver.best_schedule import find_best
from penstock.solver.placement_choices import default_placements, describe
from penstock.solver.problem import nothing_fits
from penstock.solver.question import Question
from penstock.timeline import Report

SEARCHED = "searched"
"""Stands where a schedule's name does, for one that is searched."""

_EFFORT, _SECONDS = 0.1, 10.0  # A taste, in a second or less: `penstock search` is thorough.


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule that can be run."""

    name: str
    placement: Placement
    report: Report
    time: float
    bubble: float
    """Both by the clock."""
    gap: float | None
    """By which share it is slower than the bound of its placement; None if it does not fit."""
    excess: str
    """What it needs more than there is; empty if it fits."""


class Comparison:
    """What was compared so far."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.left_out: dict[str, str] = {}
        """Schedules that cannot be made for the question, and why."""
        self._bounds: dict[Placement, tuple[Problem, float]] = {}
        self._rows: list[Row] = []

    @property
    def rows(self) -> list[Row]:
        """Those that fit first, the fastest first, and of those as fast who holds less."""
        return sorted(
            self._rows,
            # Times that differ by rounding alone are equal, whatever their unit.
            key=lambda row: (row.excess != "", float(f"{row.time:.9g}"), row.report.peak_memory),
        )

    @property
    def bounds(self) -> dict[Placement, float]:
        """A time that no schedule can beat, for each placement."""
        return {placement: bound for placement, (_, bound) in self._bounds.items()}

    @property
    def bound_in_words(self) -> str:
        """The bounds in a sentence."""
        unit = self.question.costs.time_unit
        bounds = [
            f"{in_time(time, unit)} ({describe(where)})" for where, time in self.bounds.items()
        ]
        return f"No schedule is faster than {', '.join(bounds)}."

    def add(self, name: str, schedule: Schedule) -> Row | None:
        """Adds a schedule; without a backward it is left out."""
        if not schedule.has_backward:
            self.left_out[name] = "has no backward"
            return None
        problem, bound = self._bound(schedule.placement)
        report = simulate(schedule, problem.costs)
        time = problem.time_of(report)
        excess = self.question.describe_excess(problem, report)
        is_makespan = self.question.clock == "makespan"
        row = Row(
            name=name,
            placement=schedule.placement,
            report=report,
            time=time,
            bubble=report.bubble_by_makespan if is_makespan else report.bubble_by_span,
            gap=None if excess else _gap(time, bound),
            excess=excess,
        )
        self._rows.append(row)
        return row

    def add_registered(self, generator: Generator, stages_per_rank: int | None) -> Row | None:
        """Only if it trains; with `stages_per_rank` if it takes any number, else with its own."""
        count = generator.stages_per_rank
        if generator.takes_any_stages_per_rank and stages_per_rank is not None:
            count = stages_per_rank
        question = self.question
        shape = Shape(question.num_ranks, question.num_microbatches, count)
        fewest = generator.min_microbatches(shape)
        if shape.m < fewest:
            self.left_out[generator.name] = f"needs {fewest} microbatches"
        else:
            schedule = generator(
                num_ranks=shape.p, num_microbatches=shape.m, stages_per_rank=shape.v
            )
            if schedule.has_backward:
                return self.add(generator.name, schedule)
        return None

    def check_memory(self) -> None:
        """Raises if nothing can fit, and says what would."""
        problems = [problem for problem, _ in self._bounds.values()]
        if all(problem.find_shortage() is not None for problem in problems):
            raise nothing_fits(problems)

    def search(self) -> None:
        """Adds the best that is found for each number of stages that was compared."""
        question = self.question
        for num_stages in sorted({placement.num_stages for placement in self._bounds}):
            if num_stages % question.num_ranks:
                continue  # They are in a file, and cannot be placed otherwise.
            placements = default_placements(num_stages, question.num_ranks)
            found = find_best(question, [placements], seconds=_SECONDS, effort=_EFFORT)
            self.add(SEARCHED, found.schedule)

    def _bound(self, placement: Placement) -> tuple[Problem, float]:
        if placement not in self._bounds:
            problem = self.question.problem(placement)
            self._bounds[placement] = problem, lower_bound(problem)
        return self._bounds[placement]


def _gap(time: float, bound: float) -> float:
    gap = time / bound - 1 if bound > 0 else 0.0
    return gap if gap > 1e-9 else 0.0  # What is less is rounding.

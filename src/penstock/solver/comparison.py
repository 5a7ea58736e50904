"""Comparisons of schedules for one question, as `penstock compare` and the studio show them."""

from dataclasses import dataclass

from penstock.costs.units import in_time
from penstock.errors import ScheduleError
from penstock.ir import Placement, Schedule
from penstock.passes import remove_gathers
from penstock.schedules.generator import Generator, Shape
from penstock.sim import simulate
from penstock.solver import Problem, lower_bound
from penstock.solver.best_schedule import find_best
from penstock.solver.chosen_orders import count_recomputed
from penstock.solver.gathered_search import best_gathers, check_room
from penstock.solver.placement_choices import default_placements, describe
from penstock.solver.question import Question
from penstock.solver.shortage import nothing_fits
from penstock.timeline import Report

SEARCHED = "searched"
"""The name shown for a searched schedule."""

_EFFORT, _SECONDS = 0.1, 10.0  # Quick, a second or less; `penstock search` is thorough.


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule that can be run."""

    name: str
    schedule: Schedule
    report: Report
    time: float
    bubble: float
    """By the clock, as is `time`."""
    gap: float | None
    """The gap to the bound of its placement.

    None if it does not fit, or if it recomputes and the bound is for schedules that do not.
    """
    excess: str
    """The memory it needs where it exceeds a cap, in words; empty if it fits."""

    @property
    def placement(self) -> Placement:
        return self.schedule.placement


class Comparison:
    """The schedules compared so far."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.left_out: dict[str, str] = {}
        """The schedules that are not compared, each with the reason."""
        self._bounds: dict[Placement, tuple[Problem, float]] = {}
        self._rows: list[Row] = []

    @property
    def rows(self) -> list[Row]:
        """The rows that fit, then the others; each by time, then by peak memory."""
        return sorted(
            self._rows,
            # Times that differ only by rounding count as equal, whatever their unit.
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
        """Add a schedule, with the gathers of the question.

        It is left out if it has no backward, or cannot have these gathers.
        """
        if not schedule.has_backward:
            self.left_out[name] = "has no backward"
            return None
        problem, bound = self._bound(schedule.placement)
        gathers = self.question.gathers
        if gathers is None:
            report = simulate(schedule, problem.costs)
        else:
            placed = best_gathers(name, remove_gathers(schedule), problem, gathers)
            if placed is None:
                self.left_out[name] = "needs more stages at once than may be gathered"
                return None
            name, report = f"{name}, gathered {placed.policy}", placed.report
        time = problem.time_of(report)
        excess = self.question.describe_excess(problem, report)
        is_makespan = self.question.clock == "makespan"
        is_beyond = not self.question.recompute and any(count_recomputed(schedule))
        row = Row(
            name=name,
            schedule=schedule,
            report=report,
            time=time,
            bubble=report.bubble_by_makespan if is_makespan else report.bubble_by_span,
            gap=None if excess or is_beyond else _gap(time, bound),
            excess=excess,
        )
        self._rows.append(row)
        return row

    def add_registered(self, generator: Generator, stages_per_rank: int | None) -> Row | None:
        """Add a registered schedule if it has a backward.

        It has `stages_per_rank` stages on each rank if it takes any number, otherwise its own.
        """
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
        """Raise an error if no schedule can fit, with the smallest memory that would."""
        problems = [problem for problem, _ in self._bounds.values()]
        if self.question.gathers is not None:
            check_room(problems, self.question.gathers)
        elif all(problem.find_shortage() is not None for problem in problems):
            raise nothing_fits(problems)

    def search(self) -> None:
        """Add the best schedule found for each number of stages that was compared."""
        question = self.question
        for num_stages in sorted({placement.num_stages for placement in self._bounds}):
            if num_stages % question.num_ranks:
                continue  # They come from a file and cannot be placed in another way.
            placements = default_placements(num_stages, question.num_ranks)
            try:
                found = find_best(question, [placements], seconds=_SECONDS, effort=_EFFORT)
            except ScheduleError:
                continue  # Other numbers of stages fit in the memory, or check_memory raises.
            self.add(SEARCHED, found.schedule)

    def _bound(self, placement: Placement) -> tuple[Problem, float]:
        if placement not in self._bounds:
            problem = self.question.problem(placement)
            self._bounds[placement] = problem, lower_bound(problem)
        return self._bounds[placement]


def _gap(time: float, bound: float) -> float:
    gap = time / bound - 1 if bound > 0 else 0.0
    return gap if gap > 1e-9 else 0.0  # Anything less is rounding.

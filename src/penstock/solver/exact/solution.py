"""The best possible schedule, with a proof, for small problems.

CP-SAT of OR-tools chooses the orders. A few ranks with up to six microbatches take seconds. Beyond
that, it can still improve a schedule and find a lower bound.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real

from penstock.costs import CostTable
from penstock.errors import CostError, ScheduleError
from penstock.extras import needed_by
from penstock.ir import Forward, Placement, Recompute, Schedule
from penstock.ir.action import compute_parts
from penstock.schedules.generator import Clock
from penstock.sim import simulate
from penstock.solver.exact.incumbent import ExactProgress, Incumbent
from penstock.solver.exact.ticks import TickProblem, to_ticks
from penstock.solver.problem import Problem
from penstock.solver.problem_checks import RecomputeChoice, check_costs, check_recompute
from penstock.solver.safe_schedules import least_memory
from penstock.solver.shortage import nothing_fits
from penstock.timeline import Report

_CLOSE = 1 + 1e-6  # A time this close to the lower bound is called optimal.
_SHARE_IN_ORDER = 0.4  # Of the time, for microbatches in order, if they may be in any.


@dataclass(frozen=True, slots=True)
class ExactResult:
    """The schedule that the solver found, and the bound that it proved."""

    schedule: Schedule
    """Without communication."""
    report: Report
    lower_bound: float
    """No schedule takes less, by the clock that was asked for; in the unit of the costs."""
    is_optimal: bool
    """True if the schedule takes at most a millionth more than the lower bound."""
    seconds: float
    """The time that the search took."""


def print_progress(progress: ExactProgress) -> None:
    """Print a line to stderr; pass it to `solve` as `progress`."""
    bound = progress.lower_bound
    gap = progress.best / bound - 1 if bound > 0 else inf
    print(
        f"{progress.seconds:6.1f} s  best {progress.best:.6g}  "
        f"lower bound {bound:.6g}  gap {gap:.2%}",
        file=sys.stderr,
    )


def solve(
    costs: CostTable,
    placement: Placement,
    num_microbatches: int,
    *,
    memory: float | Sequence[float] | None = None,
    clock: Clock = "makespan",
    seconds: float = 60.0,
    hint: Schedule | None = None,
    progress: Callable[[ExactProgress], None] | None = None,
    recompute: RecomputeChoice = False,
) -> ExactResult:
    """Return the schedule that takes the least time by `clock`, or the best found in `seconds`.

    Needs `pip install 'penstock[exact]'`. Each backward is full or split, whichever is better;
    there are no overlaps. No rank holds more than `memory`: one number for all ranks, or
    one for each. The search begins with `hint`, and calls `progress` when it finds a better
    schedule or bound; `print_progress` shows them. It uses one core, and gives the same result each
    time unless `seconds` run out.

    With `recompute`, forwards may be recomputed, as in `search`, and microbatches may be in any
    order on each stage.

    For the bound, times without a common unit are rounded down to a ten-millionth of the longest,
    and memory to a millionth of the largest. Schedules are timed and checked with exact numbers.

    >>> costs = CostTable.uniform(2, backward_weight=0.5)
    >>> result = solve(costs, Placement.linear(2), 2)
    >>> result.report.makespan, result.lower_bound, result.is_optimal
    (6.5, 6.5, True)
    """
    _check(costs, placement, seconds)
    check_costs(costs)
    problem = Problem.of(
        costs,
        placement,
        num_microbatches,
        memory=memory,
        clock=clock,
        recompute=check_recompute(recompute, costs),
    )
    if problem.find_shortage() is not None:
        raise nothing_fits([problem])
    start = least_memory(problem) if hint is None else _plain(hint, problem)
    search = _import_search()
    incumbent = Incumbent(_fit(start, problem), problem, progress)
    in_ticks = to_ticks(problem)
    if in_ticks.alike != in_ticks.equal:
        # Schedules with microbatches in order are quickly found, and rarely beaten.
        incumbent.is_restricted = True
        search(in_ticks.in_order(), incumbent, seconds * _SHARE_IN_ORDER)
        incumbent.is_restricted = False
    search(in_ticks, incumbent, max(seconds - incumbent.seconds, 0.0))
    return ExactResult(
        schedule=incumbent.schedule,
        report=incumbent.report,
        lower_bound=min(incumbent.lower_bound, incumbent.time),  # They may differ by rounding.
        is_optimal=incumbent.time <= incumbent.lower_bound * _CLOSE,
        seconds=incumbent.seconds,
    )


def _import_search() -> Callable[[TickProblem, Incumbent, float], None]:
    with needed_by("The exact solver", ["ortools"], extra="exact", error=ScheduleError):
        from penstock.solver.exact.constraint_search import search
    return search


def _check(costs: CostTable, placement: Placement, seconds: float) -> None:
    if not isinstance(seconds, Real) or not seconds > 0:
        raise ScheduleError(f"seconds is {seconds!r}. Expected a positive number.")
    if not isinstance(costs, CostTable) or not isinstance(placement, Placement):
        return  # Problem.of refuses these.
    ends = placement.ranks[:-1], placement.ranks[1:]
    for edge, (time, a, b) in enumerate(zip(costs.transfer, *ends, strict=False)):
        if time > 0 and a != b:
            raise CostError(
                f"message_bytes / bandwidth of edge {edge} is {time:g}. The exact solver cannot "
                "model messages that wait for each other: add the time to delay, and set "
                "message_bytes to 0."
            )


def _plain(hint: Schedule, problem: Problem) -> Schedule:
    """Return the hint without communication and overlaps."""
    placement, num_microbatches = problem.placement, problem.num_microbatches
    if not isinstance(hint, Schedule):
        raise ScheduleError(f"hint is {hint!r}. Expected a Schedule.")
    if (hint.placement, hint.num_microbatches) != (placement, num_microbatches):
        raise ScheduleError(
            f"hint has {hint.num_microbatches} microbatches and {hint.placement}. "
            f"Expected {num_microbatches} and {placement}: the same as in the other arguments."
        )
    orders = [[part for action in order for part in compute_parts(action)] for order in hint.orders]
    recomputes = any(isinstance(action, Recompute) for order in orders for action in order)
    if recomputes and not problem.may_recompute:
        raise ScheduleError(
            "hint recomputes forwards, but recompute is False. Set it to True, or give "
            "remove_recompute(hint)."
        )
    if all(isinstance(action, Forward) for order in orders for action in order):
        raise ScheduleError("hint has no backwards. Expected a schedule for training.")
    return Schedule(orders, placement, num_microbatches)


def _fit(schedule: Schedule, problem: Problem) -> Report:
    """Return the report of a schedule, or raise an error if it exceeds the caps."""
    report = simulate(schedule, problem.costs)
    rank = problem.find_excess(report)
    if rank is not None:
        raise ScheduleError(
            f"hint holds {report.ranks[rank].peak_memory:g} on rank {rank}, but memory is "
            f"{problem.caps[rank]:g} there. Expected a schedule that fits: give another, or none."
        )
    return report

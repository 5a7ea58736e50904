"""The error for caps within which nothing fits."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from penstock.errors import ScheduleError
from penstock.solver.problem import Problem
from penstock.solver.problem_checks import knows_dropping


def nothing_fits(problems: Sequence[Problem]) -> ScheduleError:
    """Return the error for caps that are too small, with the smallest memory that would fit."""
    problem = min(problems, key=lambda problem: max(problem.smallest_caps))
    rank = problem.find_shortage()
    assert rank is not None
    cap, needed = in_full(problem.caps[rank]), in_full(problem.smallest_caps[rank])
    least = max(problem.smallest_caps)
    with_drops = (
        max(replace(one, may_recompute=True).smallest_caps)
        for one in problems
        if knows_dropping(one.costs)
    )
    dropped = min(with_drops, default=inf)
    hint = (
        f" If forwards may be recomputed, {in_full(dropped)} is enough." if dropped < least else ""
    )
    return ScheduleError(
        f"Nothing fits: rank {rank} may hold {cap}, but one microbatch on its stages "
        f"{list(problem.stages_of[rank])} needs {needed}. The smallest "
        f"memory that fits is {in_full(least)} on each rank: allow that, use "
        f"smaller microbatches, or cut the model into more stages.{hint}"
    )


def in_full(value: float) -> str:
    """Format `value` with all digits, so that a user who enters it has enough memory."""
    return f"{value:.0f}" if value.is_integer() else repr(value)

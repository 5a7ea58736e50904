"""The best schedule for a question, over several numbers of stages, and what limits it."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.ir import Placement
from penstock.solver import SearchResult, search
from penstock.solver.advice import Advice
from penstock.solver.question import Question


def find_best(
    question: Question, groups: Sequence[list[Placement]], *, seconds: float, effort: float
) -> SearchResult:
    """Return the best result over groups of placements, with a bound that holds for all groups.

    Each group is searched separately; its placements have the same number of stages.
    """
    found: list[SearchResult] = []
    failures: list[ScheduleError] = []
    for placements in groups:
        try:
            found.append(
                search(
                    question.costs.table(placements[0]),
                    question.num_ranks,
                    question.num_microbatches,
                    memory=question.memory,
                    placements=placements,
                    clock=question.clock,
                    seconds=seconds / len(groups),
                    effort=effort,
                    gathers=question.gathers,
                    recompute=question.recompute,
                )
            )
        except ScheduleError as error:  # Nothing with these placements fits.
            failures.append(error)
    if not found:
        raise failures[0]
    return replace(
        min(found, key=lambda one: one.time),
        lower_bound=min(one.lower_bound for one in found),
        tried=tuple(tried for one in found for tried in one.tried),
        seconds=sum(one.seconds for one in found),
        is_complete=all(one.is_complete for one in found),
    )


def advise_on(
    question: Question,
    found: SearchResult,
    groups: Sequence[list[Placement]],
    *,
    seconds: float,
    effort: float,
) -> Advice:
    """Say what limits the result of `find_best`, and what would help that was not searched."""
    v = Placement.v(question.num_ranks)
    return found.advise(
        costs_in_v=None if any(v in group for group in groups) else question.costs.table(v),
        seconds=seconds,
        effort=effort,
    )

"""Search for the best schedule for given costs and memory."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from penstock.costs import CostTable
from penstock.ir import Placement
from penstock.schedules.generator import Clock
from penstock.solver.gathered_search import GatherChoice, search_with_gathers
from penstock.solver.placement_choices import check_placements, default_placements
from penstock.solver.problem import Problem
from penstock.solver.problem_checks import (
    RecomputeChoice,
    check_costs,
    check_positive,
    check_recompute,
)
from penstock.solver.search_result import SearchResult
from penstock.solver.search_state import SearchState
from penstock.solver.shortage import nothing_fits


def search(
    costs: CostTable,
    num_ranks: int,
    num_microbatches: int,
    *,
    memory: float | Iterable[float] | None = None,
    placements: Iterable[Placement] | None = None,
    clock: Clock = "makespan",
    seconds: float = 60.0,
    effort: float = 1.0,
    gathers: GatherChoice | None = None,
    recompute: RecomputeChoice = False,
) -> SearchResult:
    """Search for the best schedule for `costs`, and prove how far it is from a lower bound.

    `memory` is the most that a rank may hold, in the unit of `costs`: one number, or one for each
    rank. `placements` are those to choose from. If they are not given, the number of stages
    decides: with one stage per rank it is linear, with more both a loop and a V are tried. `clock`
    is the time to minimise.

    No registered schedule with one of these placements that fits in `memory` is faster. The same
    arguments give the same result, unless the search takes more than `seconds`: then it returns the
    best so far. More `effort` tries more schedules.

    If stages are sharded, `gathers` is the policy by which they are gathered and freed, or `"auto"`
    for the best of several; the schedule then has these actions, and `memory` counts what is
    gathered. Of the schedules that are tried, none is faster with one of the policies. `seconds`
    is the time for all of this.

    With `recompute`, forwards may be run again for their backwards, where that saves time within
    `memory`: the search decides for which stages and microbatches, and when. No registered schedule
    that fits is faster if all of its forwards are recomputed. `"auto"` is True if the costs say
    what a dropped forward holds: if `after_dropping` is between zero and `after_forward` somewhere.

    >>> costs = CostTable(
    ...     forward=[2, 2, 2, 3], backward_input=[2, 2, 2, 3], backward_weight=[1, 1, 1, 2]
    ... )
    >>> search(costs, num_ranks=4, num_microbatches=8, memory=4)
    SearchResult(makespan=70, lower_bound=70, gap=0.00%, peak_memory=4)
    """
    check_positive("seconds", seconds)
    check_positive("effort", effort)
    check_costs(costs)
    if placements is None:
        placements = default_placements(costs.num_stages, num_ranks)
    may_recompute = check_recompute(recompute, costs)
    chosen = check_placements(placements, num_ranks)
    problems = [
        Problem.of(costs, placement, num_microbatches, memory=memory, clock=clock)
        for placement in chosen
    ]
    if may_recompute and min(problems[0].caps) < inf:  # Otherwise there is nothing to gain.
        problems += [
            Problem.of(
                costs, placement, num_microbatches, memory=memory, clock=clock, recompute=True
            )
            for placement in chosen
        ]
    if gathers is not None:
        found = search_with_gathers(
            problems,
            gathers,
            lambda lowered, budget: SearchState(lowered, seconds=budget, effort=effort).find(),
            seconds=seconds,
        )
        return replace(found, memory=problems[0].memory, gathers=gathers, recompute=may_recompute)
    feasible = [problem for problem in problems if problem.find_shortage() is None]
    if not feasible:
        raise nothing_fits(problems)
    found = SearchState(feasible, seconds=seconds, effort=effort).run()
    return replace(found, memory=problems[0].memory, recompute=may_recompute)

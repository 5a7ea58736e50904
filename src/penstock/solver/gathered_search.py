"""Search for a schedule of sharded stages: the orders, and the policy by which they are gathered.

Orders are searched as if nothing were sharded, with caps that leave room for gathered stages. Each
policy then places its gathers in all of them, and the simulator decides.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from operator import add
from typing import Literal, NamedTuple, TypeAlias

from penstock.errors import ScheduleError
from penstock.ir import Schedule
from penstock.passes import Gathers, add_gathers
from penstock.sim import simulate
from penstock.solver.bounds import lower_bound
from penstock.solver.placement_choices import describe
from penstock.solver.problem import Problem, in_full
from penstock.solver.search_result import SearchResult, Tried
from penstock.timeline import Report

GatherChoice: TypeAlias = Gathers | Literal["auto"]
"""A policy of gathers, or `"auto"` for the best of several."""


class Found(NamedTuple):
    """The schedules that a search without gathers tried or found, and how it went."""

    schedules: list[Schedule]
    tried: tuple[Tried, ...]
    is_complete: bool


def search_with_gathers(
    problems: Sequence[Problem],
    gathers: GatherChoice,
    find: Callable[[Sequence[Problem], float], Found],
) -> SearchResult:
    """Return the best schedule with gathers; `find` searches orders in a share of the time."""
    start = time.monotonic()
    policies = _policies(gathers, problems)
    groups = _groups(problems, policies)
    found = [find(group, 1 / len(groups)) for group in groups]
    schedules = dict.fromkeys(schedule for one in found for schedule in one.schedules)
    by_placement = {problem.placement: problem for problem in problems}
    tried = [tried for one in found for tried in one.tried]
    best: list[tuple[float, float, Schedule, Report]] = []
    for policy in policies:
        rated: list[tuple[float, float, Schedule, Report]] = []
        for schedule in schedules:
            problem = by_placement[schedule.placement]
            try:
                placed = add_gathers(schedule, policy, _sharded(problem))
            except ScheduleError:  # An overlap needs more stages than the policy allows.
                continue
            report = simulate(placed, problem.costs)
            if problem.find_excess(report) is None:
                rated.append((problem.time_of(report), report.peak_memory, placed, report))
        if rated:
            best.append(min(rated, key=_rate))
            took, peak, placed, _ = best[-1]
            where = describe(placed.placement)
            tried.append(Tried(f"gathered {policy}", where, took, peak, True, len(rated)))
    if not best:
        raise _nothing_fits(problems, policies)
    _, _, schedule, report = min(best, key=_rate)
    return SearchResult(
        schedule=schedule,
        report=report,
        clock=problems[0].clock,
        # Gathers only add time and memory, so a bound without them holds.
        lower_bound=min(map(lower_bound, problems)),
        tried=tuple(tried),
        seconds=time.monotonic() - start,
        is_complete=all(one.is_complete for one in found),
    )


def _policies(gathers: GatherChoice, problems: Sequence[Problem]) -> list[Gathers]:
    if isinstance(gathers, Gathers):
        return [gathers]
    if gathers != "auto":
        raise ScheduleError(
            f"gathers is {gathers!r}. Expected a policy such as penstock.passes.Gathers.once(), "
            'or "auto" to choose one, or None if nothing is sharded.'
        )
    most = max(len(stages) for problem in problems for stages in problem.stages_of)
    return [Gathers.once(), Gathers.per_need(), *(Gathers.at_most(k) for k in range(1, most))]


def _groups(problems: Sequence[Problem], policies: Sequence[Gathers]) -> list[list[Problem]]:
    """Return the problems to search orders for: those of each policy, without repetitions."""
    groups: dict[object, list[Problem]] = {}
    for policy in policies:
        lowered = [_with_room_for_gathers(problem, policy) for problem in problems]
        feasible = [problem for problem in lowered if problem.find_shortage() is None]
        if feasible:
            groups[tuple((one.placement, one.caps) for one in feasible)] = feasible
    if not groups:
        raise _nothing_fits(problems, policies)
    return list(groups.values())


def _with_room_for_gathers(problem: Problem, policy: Gathers) -> Problem:
    """Return the problem with what the gathered stages of a rank hold taken from its cap."""
    room = _gathered(problem, policy)
    return replace(
        problem, caps=tuple(cap - held for cap, held in zip(problem.caps, room, strict=True))
    )


def _gathered(problem: Problem, policy: Gathers) -> list[float]:
    """Return the most that gathered stages hold on each rank."""
    held = problem.costs.gathered
    # Without overlaps, an action needs one stage, and `ahead` others may be gathered early.
    most = min(policy.most, 1 + policy.ahead if policy.frees_between else inf)
    largest = (
        sorted((held[stage] for stage in stages), reverse=True) for stages in problem.stages_of
    )
    return [float(sum(row if most == inf else row[: int(most)])) for row in largest]


def _sharded(problem: Problem) -> list[int]:
    """Return the stages whose gathers, reductions or gathered parameters cost anything."""
    costs = problem.costs
    rows = zip(costs.gather, costs.reduce, costs.gathered, strict=True)
    sharded = [stage for stage, row in enumerate(rows) if any(row)]
    return sharded or list(range(problem.num_stages))


def _rate(found: tuple[float, float, Schedule, Report]) -> tuple[float, float]:
    """Return the time, rounded, and then the peak memory."""
    return float(f"{found[0]:.9g}"), found[1]


def _nothing_fits(problems: Sequence[Problem], policies: Sequence[Gathers]) -> ScheduleError:
    """Return the error for caps that are too small, with the smallest memory that would fit."""
    needs = [
        map(add, problem.smallest_caps, _gathered(problem, policy))
        for problem in problems
        for policy in policies
    ]
    least = min(map(max, needs))
    return ScheduleError(
        f"Nothing fits: with {' or '.join(map(str, policies))} as the policy of gathers, one "
        f"microbatch and the gathered stages of a rank hold {in_full(float(least))}, but the caps "
        f"are {', '.join(map(in_full, problems[0].caps))}. Allow that, use smaller microbatches, "
        "or cut the model into more stages."
    )

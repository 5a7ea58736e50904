"""Search for a schedule of sharded stages: the orders, and the policy by which they are gathered.

Orders are searched as if nothing were sharded, with caps that leave room for gathered stages. Each
policy then places its gathers in all of them, the fastest first, and the simulator decides.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from operator import add
from typing import Literal, NamedTuple, TypeAlias

from penstock.costs import CostTable
from penstock.errors import ScheduleError
from penstock.ir import Placement, Schedule, Unshard
from penstock.passes import Gathers, add_gathers
from penstock.sim import simulate
from penstock.solver.bounds import lower_bound
from penstock.solver.placement_choices import describe
from penstock.solver.problem import Problem
from penstock.solver.search_result import SearchResult, Tried
from penstock.solver.shortage import in_full
from penstock.timeline import Report

GatherChoice: TypeAlias = Gathers | Literal["auto"]
"""A policy of gathers, or `"auto"` for the best of several."""


SAFE = "one at a time"
"""The name of the schedule that fits if any does."""

_SHARE_OF_ORDERS = 0.5  # Of the time; the rest is for placing gathers.
_MOST_AHEADS = 6  # The number of ways to gather early: by at most 16 actions.


class Ungathered(NamedTuple):
    """A schedule without gathers, with the way in which it was made."""

    name: str
    schedule: Schedule
    time: float


class Found(NamedTuple):
    """The schedules that a search without gathers tried or found, and how it went."""

    schedules: list[Ungathered]
    is_complete: bool


class Placed(NamedTuple):
    """A schedule with its gathers."""

    name: str
    policy: Gathers
    schedule: Schedule
    report: Report
    time: float
    fits: bool


def search_with_gathers(
    problems: Sequence[Problem],
    gathers: GatherChoice,
    find: Callable[[Sequence[Problem], float], Found],
    *,
    seconds: float,
) -> SearchResult:
    """Return the best schedule with gathers; `find` searches orders in a number of seconds."""
    start = time.monotonic()
    policies = _policies(gathers, problems)
    groups = _groups(problems, policies)
    found = [find(group, seconds * _SHARE_OF_ORDERS / len(groups)) for group in groups]
    by_placement = {problem.placement: problem for problem in problems}
    names: dict[Schedule, str] = {}
    for one in sorted((one for each in found for one in each.schedules), key=_turn):
        names.setdefault(one.schedule, one.name)
    is_complete = all(one.is_complete for one in found)
    placed: list[Placed] = []
    for schedule, name in names.items():
        if name != SAFE and time.monotonic() > start + seconds:
            is_complete = False
            break
        problem = by_placement[schedule.placement]
        placed += _place(name, schedule, problem, policies)
    best = min(placed, key=_rate, default=None)
    if best is None or not best.fits:
        raise _nothing_fits(problems, policies)
    return SearchResult(
        schedule=best.schedule,
        report=best.report,
        clock=problems[0].clock,
        # Gathers only add time and memory, so a bound without them holds.
        lower_bound=min(map(lower_bound, problems)),
        tried=_tried(placed),
        seconds=time.monotonic() - start,
        is_complete=is_complete,
    )


def best_gathers(
    name: str, schedule: Schedule, problem: Problem, gathers: GatherChoice
) -> Placed | None:
    """Return the schedule with the best gathers; None if it can have none of them."""
    placed = _place(name, schedule, problem, _policies(gathers, [problem]))
    return min(placed, key=_rate, default=None)


def check_room(problems: Sequence[Problem], gathers: GatherChoice) -> None:
    """Raise an error if nothing fits with gathers, with the smallest memory that would."""
    policies = _policies(gathers, problems)
    if not _groups(problems, policies):
        raise _nothing_fits(problems, policies)


def _rate(placed: Placed) -> tuple[bool, float, int, float]:
    """Return a key: what fits is better, then less time, rounded, fewer gathers, less memory."""
    gathers = sum(isinstance(action, Unshard) for row in placed.schedule.orders for action in row)
    return not placed.fits, float(f"{placed.time:.9g}"), gathers, placed.report.peak_memory


def _turn(one: Ungathered) -> tuple[bool, float]:
    """Return what to place gathers in first: what fits, so that there is a result in any case."""
    return one.name != SAFE, one.time


def _place(
    name: str, schedule: Schedule, problem: Problem, policies: Sequence[Gathers]
) -> Iterator[Placed]:
    """Yield the schedule with the gathers of each policy that it can have."""
    for policy in policies:
        try:
            gathered = add_gathers(schedule, policy, _sharded(problem))
        except ScheduleError:  # An overlap needs more stages than the policy allows.
            continue
        report = simulate(gathered, problem.costs)
        fits = problem.find_excess(report) is None
        yield Placed(name, policy, gathered, report, problem.time_of(report), fits)


def _tried(placed: Sequence[Placed]) -> tuple[Tried, ...]:
    """Return, for each way of making orders, the best of them with gathers."""
    rows: dict[tuple[str, Placement], list[Placed]] = {}
    for one in placed:
        rows.setdefault((one.name, one.schedule.placement), []).append(one)
    best = [(min(row, key=_rate), len(row)) for row in rows.values()]
    return tuple(
        Tried(
            name=f"{one.name}, gathered {one.policy}",
            placement=describe(one.schedule.placement),
            time=one.time,
            peak_memory=one.report.peak_memory,
            fits=one.fits,
            count=count,
        )
        for one, count in best
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
    return [
        policy
        for ahead in _aheads(problems[0].costs)
        for policy in (
            Gathers.once(ahead=ahead),
            Gathers.per_need(ahead=ahead),
            *(Gathers.at_most(k, ahead=ahead) for k in range(1, most)),
        )
    ]


def _aheads(costs: CostTable) -> list[int]:
    """Return how early to gather: 1 and 0, then as early as the longest gather takes to hide."""
    times = (*costs.forward, *costs.backward_input, *costs.backward_weight)
    hidden = max(costs.gather) * len(times) / (sum(times) or 1.0)
    aheads = [1, 0]
    while max(aheads) < hidden and len(aheads) < _MOST_AHEADS:
        aheads.append(2 * max(aheads))
    return aheads


def _groups(problems: Sequence[Problem], policies: Sequence[Gathers]) -> list[list[Problem]]:
    """Return the problems to search orders for: those of each policy, without repetitions."""
    groups: dict[object, list[Problem]] = {}
    for policy in policies:
        lowered = [_with_room_for_gathers(problem, policy) for problem in problems]
        feasible = [problem for problem in lowered if problem.find_shortage() is None]
        if feasible:
            groups[tuple((one.placement, one.caps) for one in feasible)] = feasible
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
        f"are {', '.join(map(in_full, problems[0].caps))}. Raise the caps, use smaller "
        "microbatches, or cut the model into more stages."
    )

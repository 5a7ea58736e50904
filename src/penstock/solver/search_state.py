"""The state of a search: what it tries, in which order and how much of it, and the best so far."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp, inf
from typing import TypeAlias

from penstock.ir import Placement, Schedule
from penstock.passes import add_recompute
from penstock.passes.held_memory import ROUNDING
from penstock.sim import simulate
from penstock.solver.annealing import anneal
from penstock.solver.bounds import latest_inputs, lower_bound
from penstock.solver.dispatch_policies import grid, vary
from penstock.solver.dispatching import Policy, dispatch
from penstock.solver.endings import finish
from penstock.solver.evaluation import evaluate, peak_memory
from penstock.solver.gathered_search import SAFE, Found, Ungathered
from penstock.solver.named_codes import FULL, INPUT, WEIGHT
from penstock.solver.placement_choices import describe
from penstock.solver.problem import Order, Problem, codes
from penstock.solver.recomputed_orders import drop_all, drop_to_fit
from penstock.solver.recomputing_dispatch import dispatch_with_drops
from penstock.solver.registered_schedules import registered
from penstock.solver.safe_schedules import least_memory
from penstock.solver.search_result import SearchResult, Tried, best_of_each
from penstock.solver.sequences import begin_with, change_places, more_sequences, with_sequence
from penstock.timeline import Report

_ENDINGS, _MOVED = "endings", "moves"
_FAR_BEHIND = 1.05  # A placement this much slower than the best is dropped.
_NUM_SEQUENCES = 2  # The number of best sequences for which policies vary, if microbatches differ.
_SHARE_OF_SEQUENCES = 0.4  # Of the variations of a policy change the sequence instead.
_NUM_STARTS = 4  # The number of best orders from which walks start.
# The heats of the walks and of the last walks, as multiples of the mean time of an action.
_HEATS, _LAST_HEATS = (0.2, 0.8, 2.4), (0.3, 0.1, 0.1)
# By how much walks may exceed the caps on the way, in turn, where forwards may be recomputed.
_LEEWAYS = (0.2, 0.4, 0.0)
# If microbatches differ: how many walks, how warm, how long. Each begins where one before ended.
_NUM_STARTS_IF_DIFFERENT = 24
_FIRST_ROUND = _NUM_STARTS_IF_DIFFERENT, 0.1, 0.3
_ROUNDS_IF_DIFFERENT = (_FIRST_ROUND, (12, 0.3, 0.9), (6, 0.5, 2.0), (3, 0.3, 3.0))
_MOST_ACTIONS_OF_MANY_WALKS = 400  # With more, each of so many walks would be too short.
_LAST_LENGTH = 3  # The last walks are this many times as long.
# The amounts to try with an effort of 1; they shrink as the number of actions grows:
_GRID, _FEWEST_IN_GRID = 3e5, 72  # policies that all ranks share,
_POLICIES, _FEWEST_POLICIES, _MOST_POLICIES = 2e5, 100, 2_000  # policies near the best of them,
_MOVES, _FEWEST_MOVES, _MOST_MOVES = 1.7e8, 30, 12_000  # and moves of each walk.
_MOST_MOVES_IF_DIFFERENT = 2_500  # If microbatches differ, orders are rarely proven to be best.
_SEQUENCES, _FEWEST_SEQUENCES, _MOST_SEQUENCES = 5e4, 6, 200  # Policies on more sequences.


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Orders that fit, and the time they take."""

    name: str
    """How they were made, as in `Tried`."""
    problem: Problem
    orders: list[Order]
    time: float
    cost: float
    """See `Evaluation`."""

    def is_within(self, problem: Problem) -> bool:
        """Return whether these are also orders for a problem that allows more."""
        own = self.problem.placement, self.problem.sequence
        return own == (problem.placement, problem.sequence)

    def is_same(self, other: "_Candidate") -> bool:
        """Return whether these are the same orders of the same sequence."""
        is_same = self.problem.arrangement == other.problem.arrangement
        return is_same and self.orders == other.orders


_Dispatched: TypeAlias = tuple[_Candidate, Policy]
"""Orders, and the policy that made them."""


class SearchState:
    """The state of one search: what it has found so far, and when it must stop."""

    def __init__(self, problems: Sequence[Problem], *, seconds: float, effort: float) -> None:
        self._problems = [one for problem in problems for one in begin_with(problem)]
        self._effort = effort
        self._start = time.monotonic()
        self._seconds = seconds
        self._deadline = self._start + seconds
        self._bounds = {_key(problem): lower_bound(problem) for problem in problems}
        # By placement, the problem that allows recomputation, if that is asked for.
        self._widest = {one.placement: one for one in problems if one.may_recompute}
        self._tried: list[Tried] = []
        self._simulated: list[Ungathered] = []
        self._registered: list[tuple[Schedule, Report]] = []
        self._best: list[_Candidate] = []
        self._num_walks = 0
        self._is_complete = True

    def run(self) -> SearchResult:
        """Return the best schedule."""
        self._try_all()
        return self._result()

    def find(self) -> Found:
        """Return all registered schedules, whether they fit or not, and the best others."""
        self._try_all()
        best = sorted(self._best, key=_time)[: 2 * _NUM_STARTS]
        others = [Ungathered(one.name, one.problem.schedule(one.orders), one.time) for one in best]
        return Found([*self._simulated, *others], self._is_complete)

    def _try_all(self) -> None:
        """Try first without recomputation, to miss nothing that is found without it; then with."""
        kinds = [[*kind] for _, kind in groupby(self._problems, lambda one: one.may_recompute)]
        for number, problems in enumerate(kinds, start=1):
            self._deadline = self._start + self._seconds * number / len(kinds)
            self._try_kind(problems)

    def _try_kind(self, problems: Sequence[Problem]) -> None:
        """Try [1] registered schedules, [2] policies, [3] variations of the best, [4] moves.

        If microbatches differ, the best policies are tried on more sequences before [4].

        After [1] and [3], the best get new endings.
        """
        for problem in problems:
            if problem.may_recompute:
                self._try_recomputed(problem)
            else:
                self._try_registered(problem)
                self._try_endings(problem)
        policies = [(problem, self._try_policies(problem)) for problem in problems]
        may_recompute = problems[0].may_recompute
        best = min((candidate.time for candidate in self._own(may_recompute)), default=inf)
        varied: Counter[tuple[Placement, bool]] = Counter()
        for problem, found in sorted(policies, key=lambda pair: self._best_of(pair[0])):
            # A placement that is much slower now will not be the best in the end.
            is_close = self._best_of(problem) <= best * _FAR_BEHIND
            if found and is_close and varied[_key(problem)] < _NUM_SEQUENCES:
                varied[_key(problem)] += 1
                nearby = self._try_nearby(problem, found[0][1])
                self._try_endings(nearby.problem)
        self._try_sequences([pair for _, found in policies for pair in found])
        self._try_moves(may_recompute)

    def _try_registered(self, problem: Problem) -> None:
        shape = problem.placement, problem.num_microbatches
        least = SAFE, least_memory(problem)
        for name, in_order in (*registered(*shape), least):
            schedule = with_sequence(in_order, problem.sequence)
            fits, took = self._simulate(name, problem, schedule)
            if fits:
                orders = _split_where_quicker(problem, codes(in_order))
                split = self._rate(f"{name}, backwards split", problem, orders)
                self._best.append(split)
                if split.time < took:
                    self._note(split, 1)

    def _try_recomputed(self, problem: Problem) -> None:
        """Try every registered schedule with all of its forwards recomputed, and with some."""
        shape = problem.placement, problem.num_microbatches
        if problem.better_dropped:  # Otherwise it is the same without recomputation.
            self._simulate(SAFE, problem, with_sequence(least_memory(problem), problem.sequence))
        for name, in_order in registered(*shape):
            orders = _split_where_quicker(problem, codes(in_order))
            schedule = with_sequence(in_order, problem.sequence)
            fits, _ = self._simulate(f"{name}, recomputed", problem, add_recompute(schedule))
            if fits:
                everything = [drop_all(problem, order) for order in orders]
                self._best.append(self._rate(f"{name}, recomputed", problem, everything))
            some = [drop_to_fit(problem, rank, order) for rank, order in enumerate(orders)]
            fitting = [order for order in some if order is not None]
            if len(fitting) == len(some):
                found = self._rate(f"{name}, partly recomputed", problem, fitting)
                self._best.append(found)
                self._note(found, 1)

    def _simulate(self, name: str, problem: Problem, schedule: Schedule) -> tuple[bool, float]:
        """Note a schedule that was made by an algorithm; return whether it fits, and its time."""
        report = simulate(schedule, problem.costs)
        fits = problem.find_excess(report) is None
        took = problem.time_of(report)
        where = describe(problem.placement)
        self._tried.append(Tried(name, where, took, report.peak_memory, fits, 1))
        self._simulated.append(Ungathered(name, schedule, took))
        if fits:
            self._registered.append((schedule, report))
        return fits, took

    def _try_endings(self, problem: Problem) -> None:
        """Make the ends of the best orders anew, as if the bound could be reached."""
        if problem.may_recompute or self._is_over(problem):
            return
        best = sorted((one for one in self._best if one.problem is problem), key=_time)
        latest = latest_inputs(problem, self._goal(problem))
        found: list[_Candidate] = []
        for start in best[:_NUM_STARTS]:
            if all(code & 3 != FULL for order in start.orders for code in order):
                orders = finish(problem, start.orders, latest)
                if orders is not None:
                    found.append(self._rate(_ENDINGS, problem, orders))
        if found:
            fastest = min(found, key=_time)
            self._note(fastest, len(found))
            if fastest.time < best[0].time:
                self._best.append(fastest)

    def _try_policies(self, problem: Problem) -> list[_Dispatched]:
        """Return the best policies of the grid, one for each preference; the best first."""
        best: dict[object, _Dispatched] = {}
        count = 0
        num_actions = 3 * problem.num_stages * problem.num_microbatches
        policies = list(grid(problem))
        most = self._amount(_GRID / num_actions, _FEWEST_IN_GRID, len(policies))
        if problem.sequence:  # There are several sequences to try.
            most = -(-most // _NUM_SEQUENCES)
        for policy in policies[:: -(-len(policies) // most)]:
            if self._is_over(problem) and (best or self._is_proven(problem)):
                break  # At least one is tried, even when time is up.
            count += 1
            found = self._rate(_named("policies", problem), problem, _dispatch(problem, policy))
            kind = policy.preference, policy.keeps_room
            is_proven = found.time <= self._goal(problem)
            if is_proven or kind not in best or found.cost < best[kind][0].cost:
                best[kind] = found, policy
            if is_proven:
                break
        if not best:
            return []
        self._best += [found for found, _ in best.values()]  # There are few, and they differ.
        self._note(min((found for found, _ in best.values()), key=_time), count)
        return sorted(best.values(), key=lambda pair: pair[0].cost)

    def _try_sequences(self, tried: Sequence[_Dispatched]) -> None:
        """Try the best policies on more sequences; keep the best orders for each."""
        known = {(_key(one.problem), one.problem.sequence) for one, _ in tried}
        by_cost = sorted(tried, key=lambda pair: pair[0].cost)
        for key, problem in {_key(one.problem): one.problem for one, _ in by_cost[::-1]}.items():
            policies = list({policy: None for one, policy in by_cost if _key(one.problem) == key})
            num_actions = 3 * problem.num_stages * problem.num_microbatches
            left = self._amount(_SEQUENCES / num_actions, _FEWEST_SEQUENCES, _MOST_SEQUENCES)
            per_sequence = -(-left // _NUM_STARTS_IF_DIFFERENT)
            for arranged in more_sequences(problem, _NUM_STARTS_IF_DIFFERENT):
                if left <= 0 or self._is_over(problem):
                    break
                if (key, arranged.sequence) in known:
                    continue
                known.add((key, arranged.sequence))
                found = [
                    self._rate(_named("policies", problem), arranged, _dispatch(arranged, policy))
                    for policy in policies[:per_sequence]
                ]
                left -= len(found)
                fastest = min(found, key=lambda one: one.cost)
                self._best.append(fastest)
                self._note(fastest, len(found))

    def _try_nearby(self, problem: Problem, policy: Policy) -> _Candidate:
        """Vary the policy and the sequence step by step, at first also to worse ones."""
        generator = random.Random(0)
        name = _named("policies by rank", problem)
        current = best = self._rate(name, problem, _dispatch(problem, policy))
        num_actions = sum(map(len, current.orders))
        limit = self._amount(_POLICIES / num_actions, _FEWEST_POLICIES, _MOST_POLICIES)
        warmth = _mean_duration(problem) * _LAST_HEATS[-1]
        count = 0
        for number in range(limit):
            if self._is_over(problem):
                break
            changed, arranged = policy, problem
            if problem.sequence and generator.random() < _SHARE_OF_SEQUENCES:
                arranged = problem.rearranged(change_places(generator, len(problem.sequence)))
            else:
                changed = vary(generator, problem, policy)
            if changed == policy and arranged.sequence == problem.sequence:
                continue
            count += 1
            candidate = self._rate(name, arranged, _dispatch(arranged, changed))
            worse = candidate.cost - current.cost
            if worse <= 0 or generator.random() < exp(-worse / (warmth * (1 - number / limit))):
                policy, problem, current = changed, arranged, candidate
            if candidate.time < best.time:
                best = candidate
        self._best.append(best)
        if count:
            self._note(best, count)
        return best

    def _own(self, may_recompute: bool) -> list[_Candidate]:
        """Return what walks of a kind may start from: all but the ends of other walks."""
        return [
            one
            for one in self._best
            if one.name != _MOVED or one.problem.may_recompute == may_recompute
        ]

    def _try_moves(self, may_recompute: bool) -> None:
        """Walk from several of the best orders, and finally from the best of all."""
        self._num_walks = 0
        own = sorted(self._own(may_recompute), key=lambda candidate: candidate.cost)
        if own[0].problem.sequence and sum(map(len, own[0].orders)) <= _MOST_ACTIONS_OF_MANY_WALKS:
            self._try_many_walks(own, may_recompute)
            return
        starts: list[_Candidate] = []
        for candidate in own:
            # An ending is like the orders it was made for; the last walks begin with the best.
            is_new = candidate.name != _ENDINGS and not any(map(candidate.is_same, starts))
            if len(starts) < _NUM_STARTS and is_new:
                starts.append(candidate)
        for heat in _HEATS:
            for start in starts:
                self._walk(start, heat, 1.0, may_recompute)
        for heat in _LAST_HEATS:
            best = min(self._own(may_recompute), key=_time)
            self._walk(best, heat, _LAST_LENGTH, may_recompute)

    def _try_many_walks(self, own: Sequence[_Candidate], may_recompute: bool) -> None:
        """Walk a little from the best orders of each sequence, and on from those that get far.

        Annealing rarely leaves the neighbourhood of its start, and the best one is hard to foresee.
        """
        firsts: dict[object, _Candidate] = {}
        for candidate in own:
            firsts.setdefault((candidate.problem.placement, candidate.problem.sequence), candidate)
        reached = list(firsts.values())
        for count, heat, length in _ROUNDS_IF_DIFFERENT:
            starts = sorted(reached, key=lambda candidate: candidate.cost)[:count]
            reached = [self._walk(start, heat, length, may_recompute) for start in starts]

    def _walk(
        self, start: _Candidate, heat: float, length: float, may_recompute: bool
    ) -> _Candidate:
        """Keep the best orders of one walk, and return them."""
        problem = self._widen(start.problem) if may_recompute else start.problem
        seed, self._num_walks = self._num_walks, self._num_walks + 1
        if self._is_over(problem):
            return start
        # With fewer actions the walk is longer, because the best orders can be reached.
        usual = _MOVES / sum(map(len, start.orders)) ** 2
        most = _MOST_MOVES_IF_DIFFERENT if problem.sequence else _MOST_MOVES
        walk = anneal(
            problem,
            start.orders,
            num_moves=round(length * self._amount(usual, _FEWEST_MOVES, most)),
            heat=heat * _mean_duration(problem),
            seed=seed,
            goal=-inf if problem.has_queues else self._goal(problem),
            deadline=self._deadline,
            leeway=_LEEWAYS[seed % len(_LEEWAYS)] if problem.may_recompute else 0.0,
        )
        self._is_complete &= walk.is_complete
        reached = self._rate(_MOVED, walk.problem, walk.orders)
        self._best.append(reached)
        if walk.num_evaluated:
            self._note(reached, walk.num_evaluated)
        return reached

    def _widen(self, problem: Problem) -> Problem:
        """Return the problem with recomputation, if that is asked for, in the same sequence."""
        widest = self._widest.get(problem.placement, problem)
        return replace(widest, **problem.arrangement, offsets=problem.offsets)

    def _amount(self, usual: float, fewest: int, most: int) -> int:
        """Return how many to try: `usual` within its limits, times the effort."""
        return max(1, round(self._effort * min(max(usual, fewest), most)))

    def _note(self, candidate: _Candidate, count: int) -> None:
        problem = candidate.problem
        peak = max(peak_memory(problem, order) for order in candidate.orders)
        where = describe(problem.placement)
        self._tried.append(Tried(candidate.name, where, candidate.time, peak, True, count))

    def _rate(self, name: str, problem: Problem, orders: list[Order]) -> _Candidate:
        timing = evaluate(problem, orders)
        took = timing.time
        if problem.has_queues and took <= self._goal(problem):
            # This time would end the search, so it must be exact.
            took = problem.time_of(simulate(problem.schedule(orders), problem.costs))
        return _Candidate(name, problem, orders, took, timing.cost)

    def _goal(self, problem: Problem) -> float:
        """Return the time at which a schedule is proven to be the best."""
        return self._bounds[_key(problem)] * ROUNDING

    def _is_over(self, problem: Problem) -> bool:
        """Return whether the best for this placement cannot be improved, or time is up."""
        if self._is_proven(problem):
            return True
        if time.monotonic() > self._deadline:
            self._is_complete = False
            return True
        return False

    def _is_proven(self, problem: Problem) -> bool:
        found = (one.time for one in self._best if one.problem.placement == problem.placement)
        return min(found, default=inf) <= self._goal(problem)

    def _best_of(self, problem: Problem) -> float:
        times = (
            found.time
            for found in self._own(problem.may_recompute)
            if found.problem is problem or (problem.may_recompute and found.is_within(problem))
        )
        return min(times, default=inf)

    def _result(self) -> SearchResult:
        """Return the best by the simulator, which models messages that wait for each other."""
        problem = self._problems[0]  # All problems have the same clock.
        finalists = list(self._registered)
        best = sorted(self._best, key=_time)
        plain = [one for one in best if not one.problem.may_recompute]
        for candidate in (*best[:_NUM_STARTS], *plain[:_NUM_STARTS]):
            schedule = candidate.problem.schedule(candidate.orders)
            report = simulate(schedule, candidate.problem.costs)
            assert candidate.problem.find_excess(report) is None
            finalists.append((schedule, report))
        bound = min(self._bounds.values())

        def rate(finalist: tuple[Schedule, Report]) -> tuple[float, float]:
            """Return the time, rounded, and then the peak memory."""
            _, report = finalist
            took = problem.time_of(report)
            return (round(took / bound, 9) if bound > 0 else took), report.peak_memory

        schedule, report = min(finalists, key=rate)
        return SearchResult(
            schedule=schedule,
            report=report,
            clock=problem.clock,
            lower_bound=bound,
            tried=best_of_each(self._tried),
            seconds=time.monotonic() - self._start,
            is_complete=self._is_complete,
        )


def _time(candidate: _Candidate) -> float:
    return candidate.time


def _key(problem: Problem) -> tuple[Placement, bool]:
    return problem.placement, problem.may_recompute


def _named(name: str, problem: Problem) -> str:
    return f"{name}, some recomputed" if problem.may_recompute else name


def _dispatch(problem: Problem, policy: Policy) -> list[Order]:
    return (dispatch_with_drops if problem.may_recompute else dispatch)(problem, policy)


def _mean_duration(problem: Problem) -> float:
    """Return the mean time of actions and messages, or 1 if none takes time."""
    times = (*problem.durations, *problem.delays)
    return sum(times) / len(times) or 1.0


def _split_where_quicker(problem: Problem, orders: list[Order]) -> list[Order]:
    """Split the full backwards of the stages on which the halves are as good."""

    def rewrite(order: Order) -> Iterator[int]:
        for code in order:
            if code & 3 == FULL and not problem.fuses(code >> 2):
                yield code - FULL + INPUT
                yield code - FULL + WEIGHT
            else:
                yield code

    return [list(rewrite(order)) for order in orders]

"""Lower bounds on the time of any schedule whose microbatches differ.

They hold for every order of the microbatches, on each stage, in F, in I and in W. There are two.

By name: an action of a microbatch cannot start before that microbatch has come through all stages
before it (its head), and what is left of its way must pass after it (its tail). All actions of a
rank together must run between their heads and tails.

By place: the n-th F to start on a stage comes after n others, which take at least as long as the n
shortest. When it starts, n + 1 microbatches have left the stage before. So heads and tails follow
from sums of the shortest actions; see `_Places`. Which microbatch has that place is not known, so a
set of places takes at least as long as the shortest actions that could have them.

By makespan, heads count from the start of the step. By span, the time of a rank counts from its own
first start, which depends on the order. So heads count from there: whatever comes back to the rank
went through the first of its stages after that. Tails through other ranks are then zero.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from penstock.passes.held_memory import ROUNDING
from penstock.solver.jackson import longest_tail_first
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Problem

_MOST_THRESHOLDS = 48  # The heads, and the tails, by which sets of places are chosen.


def uneven_bound(problem: Problem) -> float:
    """Return a time that no schedule for `problem` can beat, by its clock, in any order."""
    work = _Shortest(problem)
    places: dict[int, _Places] = {}
    found = []
    for rank, stages in enumerate(problem.stages_of):
        origin = stages[0] if problem.clock == "span" else 0
        if origin not in places:
            places[origin] = _Places(work, origin, has_tails=problem.clock == "makespan")
        found.append(_by_name(problem, work, rank, origin))
        found.append(_by_place(problem, work, rank, places[origin]))
    return max(found)


class _Shortest:
    """The least time that actions take, by stage and microbatch, and sums of the shortest.

    See `_Amount` in `solver.bounds` for why full backwards and overlaps can be left out.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_microbatches = problem.num_microbatches
        saving = problem.costs.overlap_saving
        mbs, stages = range(problem.num_microbatches), range(problem.num_stages)

        def times(stage: int, kind: int) -> list[float]:
            step = 4 * problem.num_stages
            return [problem.named.times[4 * stage + kind + step * mb] for mb in mbs]

        longest = [
            max(max(*times(s, INPUT), *times(s, FULL)) for s in held) for held in problem.stages_of
        ]
        ranks = problem.placement.ranks
        self.forward = [
            [time - saving * min(time, longest[ranks[s]]) for time in times(s, FORWARD)]
            for s in stages
        ]
        self.input = [list(map(min, times(s, INPUT), times(s, FULL))) for s in stages]
        self.weight = [
            [
                min(first + second, full) - least
                for first, second, full, least in zip(
                    times(s, INPUT), times(s, WEIGHT), times(s, FULL), self.input[s], strict=True
                )
            ]
            for s in stages
        ]
        # Sums of the n shortest.
        self.forwards: list[list[float]] = list(map(_sums, self.forward))
        self.inputs: list[list[float]] = list(map(_sums, self.input))
        self.weights: list[list[float]] = list(map(_sums, self.weight))
        self.delays: list[float] = [
            min(delays) for delays in zip(*map(problem.delays_of, mbs), strict=True)
        ]
        self._sizes = _sums(problem.costs.memory_scale or (1.0,) * problem.num_microbatches)

    def most_ahead(self, stage: int, other: int) -> int:
        """Return how many microbatches may be past F on `stage` and not past I on `other`.

        `other` is `stage` or a later stage on its rank. Each of them holds what the F of the stages
        of the rank up to `stage` have left. When the next I on `other` runs, none of them has left,
        its own microbatch holds what it left up to `other`, and the I needs room. So they are too
        many if the smallest ones are.
        """
        problem = self.problem
        rank = problem.placement.ranks[stage]
        held = problem.stages_of[rank]
        kept = sum(problem.costs.after_forward[s] for s in held if s <= stage)
        more = sum(problem.costs.after_forward[s] for s in held if stage < s <= other)
        rise = min(problem.changes[4 * other + kind].rise for kind in (INPUT, FULL))
        room = problem.caps[rank] * ROUNDING - (more + rise) * self._sizes[1]
        if room == inf:
            return self.num_microbatches
        fitting = [n for n, size in enumerate(self._sizes) if size * kept <= room]
        return max(1, fitting[-1] if fitting else 1)


def _sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(sorted(values), initial=0.0))


class _Places:
    """Heads and tails by place: `forward[stage][n]` is the head of the n-th F to start on a stage.

    `origin` is the first stage that counts; heads are from the first start there.
    """

    def __init__(self, work: _Shortest, origin: int, *, has_tails: bool) -> None:
        problem = work.problem
        self._work, self._origin = work, origin
        self.forward: dict[int, list[float]] = {s: [] for s in range(origin, problem.num_stages)}
        self.input: dict[int, list[float]] = {s: [] for s in self.forward}
        self._on_rank = {
            s: [o for o in problem.stages_of[problem.placement.ranks[s]] if o >= origin]
            for s in self.forward
        }
        self._ahead = {
            s: [(other, work.most_ahead(s, other)) for other in self._on_rank[s] if other >= s]
            for s in self.forward
        }
        first = [0.0, *accumulate(map(self._step, range(origin, problem.num_stages - 1)))]
        self._first = dict(zip(self.forward, first, strict=True))
        for place in range(work.num_microbatches):
            for stage in self.forward:
                self.forward[stage].append(max(self._heads_of_forward(stage, place)))
            for stage in reversed(self.forward):
                self.input[stage].append(max(self._heads_of_input(stage, place)))
        count = work.num_microbatches
        self.forward_tails = {s: [0.0] * count for s in self.forward}
        self.input_tails = {s: [0.0] * count for s in self.forward}
        if has_tails:
            for place in reversed(range(count)):
                for stage in self.forward:
                    self.input_tails[stage][place] = max(self._tails_of_input(stage, place))
                for stage in reversed(self.forward):
                    self.forward_tails[stage][place] = max(self._tails_of_forward(stage, place))

    def _step(self, stage: int) -> float:
        work = self._work
        return work.forwards[stage][1] + work.delays[stage]

    def _heads_of_forward(self, stage: int, place: int) -> Iterator[float]:
        work, on_rank = self._work, self._on_rank[stage]
        earlier = (work.forwards[s][place + 1] for s in on_rank if s < stage)
        yield self._first[on_rank[0]] + work.forwards[stage][place] + sum(earlier)
        if place > 0:
            yield self.forward[stage][place - 1] + work.forwards[stage][1]
        if stage > self._origin:
            yield self.forward[stage - 1][place] + self._step(stage - 1)
        for other, ahead in self._ahead[stage]:
            if place >= ahead:
                yield self.input[other][place - ahead] + work.inputs[other][1]

    def _heads_of_input(self, stage: int, place: int) -> Iterator[float]:
        work, on_rank = self._work, self._on_rank[stage]
        later = (work.inputs[s][place + 1] for s in on_rank if s > stage)
        before = sum(work.forwards[s][place + 1] for s in on_rank) + sum(later)
        yield self._first[on_rank[0]] + before + work.inputs[stage][place]
        if place > 0:
            yield self.input[stage][place - 1] + work.inputs[stage][1]
        if stage == work.problem.num_stages - 1:
            yield self.forward[stage][place] + work.forwards[stage][1]
        else:
            yield self.input[stage + 1][place] + work.inputs[stage + 1][1] + work.delays[stage]

    def _tails_of_forward(self, stage: int, place: int) -> Iterator[float]:
        """Yield times after the end of the F at a place; those after it are mirrored."""
        work, on_rank, left = self._work, self._on_rank[stage], self._work.num_microbatches - place
        later = sum(work.forwards[s][left] for s in on_rank if s > stage)
        backwards = sum(work.inputs[s][left] + work.weights[s][left] for s in on_rank)
        yield work.forwards[stage][left - 1] + later + backwards
        if left > 1:
            yield work.forwards[stage][1] + self.forward_tails[stage][place + 1]
        if stage == work.problem.num_stages - 1:
            yield work.inputs[stage][1] + self.input_tails[stage][place]
        else:
            yield self._step_after(stage) + self.forward_tails[stage + 1][place]

    def _tails_of_input(self, stage: int, place: int) -> Iterator[float]:
        work, on_rank, left = self._work, self._on_rank[stage], self._work.num_microbatches - place
        earlier = sum(work.inputs[s][left] + work.weights[s][left] for s in on_rank if s < stage)
        yield work.inputs[stage][left - 1] + work.weights[stage][left] + earlier
        if left > 1:
            yield work.inputs[stage][1] + self.input_tails[stage][place + 1]
        if stage > 0:
            after = work.inputs[stage - 1][1] + self.input_tails[stage - 1][place]
            yield work.delays[stage - 1] + after

    def _step_after(self, stage: int) -> float:
        work = self._work
        return work.delays[stage] + work.forwards[stage + 1][1]


class _Group(NamedTuple):
    """The actions of one kind on one stage: heads ascending, tails descending, sums of times."""

    heads: list[float]
    tails: list[float]
    sums: list[float]


def _by_place(problem: Problem, work: _Shortest, rank: int, places: _Places) -> float:
    """Return the largest head + times + tail of all sets: the places with such heads and tails."""
    groups = []
    for stage in problem.stages_of[rank]:
        ends = [start + work.inputs[stage][1] for start in places.input[stage]]
        zeros = [0.0] * problem.num_microbatches
        groups += [
            _Group(places.forward[stage], places.forward_tails[stage], work.forwards[stage]),
            _Group(places.input[stage], places.input_tails[stage], work.inputs[stage]),
            _Group(ends, zeros, work.weights[stage]),
        ]
    heads = _some({head for group in groups for head in group.heads})
    tails = _some({tail for group in groups for tail in group.tails})
    begins = [[bisect_left(group.heads, head) for group in groups] for head in heads]
    # The number of tails that are as long: they are descending.
    counts = [[sum(t >= tail for t in group.tails) for group in groups] for tail in tails]
    best = 0.0
    for head, begin in zip(heads, begins, strict=True):
        for tail, count in zip(tails, counts, strict=True):
            chosen = [
                group.sums[last - first]
                for group, first, last in zip(groups, begin, count, strict=True)
                if last > first
            ]
            if chosen:
                best = max(best, head + sum(chosen) + tail)
    return best


def _some(values: set[float]) -> list[float]:
    """Return the values, or some of them if they are many; the smallest is always among them."""
    ordered = sorted(values)
    return ordered[:: -(-len(ordered) // _MOST_THRESHOLDS)]


def _by_name(problem: Problem, work: _Shortest, rank: int, origin: int) -> float:
    """Return the least time of a rank that may interrupt its actions, by heads and tails."""
    jobs: list[tuple[float, float, float]] = []
    last = problem.num_stages - 1
    is_makespan = problem.clock == "makespan"
    for mb in range(problem.num_microbatches):
        delays = problem.delays_of(mb)
        forward = [row[mb] for row in work.forward]
        inputs = [row[mb] for row in work.input]
        heads = {origin: 0.0}
        for stage in range(origin, last):
            heads[stage + 1] = heads[stage] + forward[stage] + delays[stage]
        ends = {last: heads[last] + forward[last] + inputs[last]}  # Of I.
        for stage in reversed(range(origin, last)):
            ends[stage] = ends[stage + 1] + delays[stage] + inputs[stage]
        tails = {0: work.weight[0][mb] if is_makespan else 0.0}  # After I.
        for before, stage in pairwise(range(last + 1)):
            on_way = delays[before] + inputs[before] + tails[before]
            tails[stage] = max(on_way, work.weight[stage][mb]) if is_makespan else 0.0
        for stage in problem.stages_of[rank]:
            total = ends[stage] + tails[stage]
            rest = total - heads[stage] - forward[stage] if is_makespan else 0.0
            jobs += [
                (heads[stage], forward[stage], rest),
                (ends[stage] - inputs[stage], inputs[stage], tails[stage]),
                (ends[stage], work.weight[stage][mb], 0.0),
            ]
    return longest_tail_first(sorted(jobs))

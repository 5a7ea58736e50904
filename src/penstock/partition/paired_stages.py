"""Two stages per rank, in a loop or a V: the least that the heaviest rank and stage can carry.

Two fronts move along the layers. Rank 0 takes its two stages from where they start, then rank 1, …

    loop, 2 ranks   0 0 1 1 1 | 0 1 1     both go up, the second from a split; each split is tried
                    a ->        b ->
    V, 2 ranks      0 0 1 1 1 1 1 0       they meet
                    a ->       <- b

For the fronts, both placements are alike: each front has a track of layers, and starts at its 0.
A state is the places of both fronts after some rank. `_search` finds the states that can be reached
if no rank carries more than a given weight, and no stage more than another one:

[1] Given the first front before a rank and the second after it, only one of the states before it
    counts: the one with the second front furthest along, which leaves the rank the least to carry.
    (Keeping only the furthest state of all would be wrong: it may leave too few light layers for
    the ranks after it, whose stages may not be empty.)
[2] The first front can then move to any layer up to where the rank or its stage is full.
[3] The remaining ranks must be able to carry the remaining layers.
[4] The states are found in the order of the second front. So the two swap roles at each rank.

O(ranks x layers^2 x log(layers)) for one search; by [3] much less for weights near the least.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise

from penstock.partition.load import Limit, Load

# For each place of the first front, the places of the second in the states with it, ascending.
States = list[list[int]]


@dataclass(frozen=True, slots=True)
class _Track:
    """The layers that a front passes, as running sums from its start."""

    sums: Sequence[Sequence[int]]
    """Sums of the load, for each rank."""
    limited: Sequence[Sequence[int]]
    """Sums of the load that is limited, for each rank."""
    least: Sequence[int]
    """Sums of the load, if each layer is on the stage where it weighs least."""

    @classmethod
    def of(cls, load: Load, limit: Limit, stages: range, layers: range) -> "_Track":
        """Return the track along `layers`, on which each rank holds one of `stages`."""
        return cls(
            sums=[_from_zero(load.sums[stage], layers) for stage in stages],
            limited=[_from_zero(limit.load.sums[stage], layers) for stage in stages],
            least=_from_zero(load.least, layers),
        )

    @property
    def num_layers(self) -> int:
        return len(self.least) - 1


def _from_zero(sums: Sequence[int], layers: range) -> list[int]:
    return [abs(sums[layer] - sums[layers[0]]) for layer in layers]


@dataclass(frozen=True, slots=True)
class _Problem:
    tracks: tuple[_Track, _Track]
    num_layers: int
    total: int
    """The weight of all layers together, each on the stage where it weighs least."""
    most_limited: int
    least_stage: int
    """A lower bound on the load of the heaviest stage."""

    @property
    def num_ranks(self) -> int:
        return len(self.tracks[0].sums)

    @property
    def least_rank(self) -> int:
        """A lower bound on the load of the heaviest rank."""
        return -(-self.total // self.num_ranks)

    @property
    def more_than_any(self) -> int:
        """A load above that of any rank, for any cut of the layers."""
        return sum(max(sums[-1] for sums in track.sums) for track in self.tracks) + 1

    def first_and_second(self, rank: int) -> tuple[_Track, _Track]:
        """Return the tracks in their roles at `rank` [4]."""
        return self.tracks if rank % 2 == 0 else self.tracks[::-1]


@dataclass(frozen=True, slots=True)
class _Most:
    """The most that each rank and each stage may carry."""

    rank: int
    stage: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """The places of the fronts before rank 0 and after each rank, in the order of the tracks."""

    problem: _Problem
    fronts: list[tuple[int, int]]

    def heaviest_rank(self) -> int:
        return max(map(sum, self._stages_by_rank()))

    def heaviest_stage(self) -> int:
        return max(map(max, self._stages_by_rank()))

    def _stages_by_rank(self) -> list[list[int]]:
        return [
            [
                track.sums[rank][end] - track.sums[rank][start]
                for track, start, end in zip(self.problem.tracks, before, after, strict=True)
            ]
            for rank, (before, after) in enumerate(pairwise(self.fronts))
        ]


def cut_v(load: Load, limit: Limit, slack: Fraction) -> tuple[int, ...] | None:
    """Return the first layer of each stage in the best cut for a V; None if none is in `limit`.

    The heaviest rank carries as little as possible, or more by at most the share `slack`. Of such
    cuts the result has the lightest heaviest stage, and of those, the lightest heaviest rank.
    """
    num_stages, num_ranks, num_layers = load.num_stages, load.num_stages // 2, load.num_layers
    there, back = range(num_layers + 1), range(num_layers, -1, -1)
    tracks = (
        _Track.of(load, limit, range(num_ranks), there),
        _Track.of(load, limit, range(num_stages - 1, num_ranks - 1, -1), back),
    )
    total = load.least[-1]
    problem = _Problem(tracks, num_layers, total, limit.most, -(-total // num_stages))
    cut = _best([problem], slack)
    if cut is None:
        return None
    starts = [first for first, _ in cut.fronts[:-1]]
    return (*starts, *(back[second] for _, second in cut.fronts[:0:-1]))


def cut_loop(load: Load, limit: Limit, slack: Fraction) -> tuple[int, ...] | None:
    """Return the same for a loop."""
    num_stages, num_ranks, num_layers = load.num_stages, load.num_stages // 2, load.num_layers
    total = load.least[-1]
    # Even splits first: after a good one, most others need only one search.
    splits = sorted(
        range(num_ranks, num_layers - num_ranks + 1),
        key=lambda split: abs(2 * load.least[split] - total),
    )
    problems = []
    for split in splits:
        tracks = (
            _Track.of(load, limit, range(num_ranks), range(split + 1)),
            _Track.of(load, limit, range(num_ranks, num_stages), range(split, num_layers + 1)),
        )
        heavier = max(track.least[-1] for track in tracks)
        problems.append(_Problem(tracks, num_layers, total, limit.most, -(-heavier // num_ranks)))
    cut = _best(problems, slack)
    if cut is None:
        return None
    split = cut.problem.tracks[0].num_layers
    starts = [first for first, _ in cut.fronts[:-1]]
    return (*starts, *(split + second for _, second in cut.fronts[:-1]))


def _best(problems: Sequence[_Problem], slack: Fraction) -> _Cut | None:
    """Return the best cut of all the problems; None if there is none."""
    cut: _Cut | None = None
    for problem in problems:
        least = problem.least_rank
        cut = _improve(problem, cut, _Cut.heaviest_rank, lambda it: _Most(it, it), least) or cut
    if cut is None:
        return None
    lightest = cut.heaviest_rank()
    in_slack = partial(_Most, lightest + int(lightest * slack))
    for problem in problems:
        least = problem.least_stage
        cut = _improve(problem, cut, _Cut.heaviest_stage, in_slack, least) or cut
    as_even = partial(_Most, stage=cut.heaviest_stage())
    for problem in problems:  # Use no more slack than the stages need.
        cut = _improve(problem, cut, _Cut.heaviest_rank, as_even, lightest) or cut
    return cut


def _improve(
    problem: _Problem,
    best: _Cut | None,
    weigh: Callable[[_Cut], int],
    limits: Callable[[int], _Most],
    low: int,
) -> _Cut | None:
    """Return the cut that weighs least; None if that is not less than `best` weighs.

    `limits` returns the limits of cuts that weigh at most a given weight; none weighs less than
    `low`. One search shows whether there is a better cut. Only then do further searches halve the
    gap between the weights that are too small and the one that was reached, until it is closed.
    """
    found: _Cut | None = None
    below = problem.more_than_any if best is None else weigh(best)
    most = below - 1
    while low < below:
        fronts = _search(problem, limits(most))
        if fronts is not None:
            found = _Cut(problem, fronts)
            below = weigh(found)
        elif found is None:
            return None
        else:
            low = most + 1
        most = (low + below - 1) // 2
    return found


def _search(problem: _Problem, most: _Most) -> list[tuple[int, int]] | None:
    """Return the fronts before rank 0 and after each rank such that nothing exceeds `most`."""
    first = problem.tracks[0]
    history: list[States] = [[[0], *([] for _ in range(first.num_layers))]]
    for rank in range(problem.num_ranks):
        history.append(_advance(problem, most, rank, history[-1]))
    for a, fronts in enumerate(history.pop()):
        if problem.num_layers - a in fronts:
            return _way_back(problem, most, history, (a, problem.num_layers - a))
    return None


def _advance(problem: _Problem, most: _Most, rank: int, states: States) -> States:
    """Return the states after `rank`: for each place of the second front, those of the first."""
    first, second = problem.first_and_second(rank)
    sums, limited = first.sums[rank], first.limited[rank]
    second_sums, second_limited = second.sums[rank], second.limited[rank]
    ranks_left = problem.num_ranks - rank - 1
    last_a, last_b = first.num_layers - ranks_left, second.num_layers - ranks_left
    most_passed = problem.num_layers - 2 * ranks_left
    least_weight = problem.total - min(most.rank, 2 * most.stage) * ranks_left
    # For each place of the second front: the furthest place of the first in the states so far.
    # [3] At the start: the last place that leaves the remaining ranks too much.
    reached = [bisect_left(first.least, least_weight - weight) - 1 for weight in second.least]
    after: States = [[] for _ in second.least]
    for a, fronts in enumerate(states):
        end_a = bisect_right(sums, sums[a] + most.stage, a, last_a + 1)
        for b, last in pairwise([*fronts, last_b]):
            end_b = bisect_right(second_sums, second_sums[b] + most.stage, b, last + 1)
            for next_b in range(b + 1, end_b):  # [1]
                weight = sums[a] + most.rank - (second_sums[next_b] - second_sums[b])
                weight_limited = (
                    limited[a] + problem.most_limited - (second_limited[next_b] - second_limited[b])
                )
                furthest = min(  # [2]
                    bisect_right(sums, weight, a, end_a) - 1,
                    bisect_right(limited, weight_limited, a, end_a) - 1,
                    most_passed - next_b,
                )
                if furthest <= a:
                    break
                if furthest > reached[next_b]:
                    after[next_b].extend(range(max(a, reached[next_b]) + 1, furthest + 1))
                    reached[next_b] = furthest
    return after


def _way_back(
    problem: _Problem, most: _Most, history: list[States], end: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return the way to the state `end`, with the fronts in the order of the tracks.

    `history` has the states before each rank, in the roles at that rank.
    """
    state = end
    way = [end]
    for rank in range(problem.num_ranks - 1, -1, -1):
        next_b, next_a = state  # [4]
        state = _find_before(problem, most, rank, history[rank], next_a, next_b)
        way.append(state)
    return [(a, b) if rank % 2 == 0 else (b, a) for rank, (a, b) in enumerate(reversed(way))]


def _find_before(
    problem: _Problem, most: _Most, rank: int, states: States, next_a: int, next_b: int
) -> tuple[int, int]:
    """Return a state from which `rank` can move the fronts to `next_a` and `next_b`."""
    first, second = problem.first_and_second(rank)
    sums, second_sums = first.sums[rank], second.sums[rank]
    limited, second_limited = first.limited[rank], second.limited[rank]
    for a in range(next_a - 1, -1, -1):
        place = bisect_left(states[a], next_b)
        if place == 0:
            continue
        b = states[a][place - 1]  # [1]
        weights = sums[next_a] - sums[a], second_sums[next_b] - second_sums[b]
        weight_limited = limited[next_a] - limited[a] + second_limited[next_b] - second_limited[b]
        if (
            sum(weights) <= most.rank
            and max(weights) <= most.stage
            and weight_limited <= problem.most_limited
        ):
            return a, b
    raise AssertionError("a state was reached from nowhere")

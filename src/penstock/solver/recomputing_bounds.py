"""Lower bounds where forwards may be recomputed.

Both hold for every schedule, in whatever order its microbatches are on a stage.

[1] `without_recomputing` asks for less: microbatches hold only their inputs until their I, and
    nothing is run again.
[2] `trade_off` weighs the time of recomputations against the waits that they save.
"""

from dataclasses import replace
from math import floor, inf

from penstock.passes.held_memory import ROUNDING
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Problem

_MOST_MICROBATCHES = 64  # With more of them, `trade_off` would take too long.


def without_recomputing(problem: Problem) -> Problem:
    """Return a problem without recomputation that no schedule for `problem` takes longer for.

    Leave out the recomputations of a schedule, and let each F keep its inputs only. What an I or B
    needs while it runs then includes the values it needs.
    """
    costs, changes = problem.costs, problem.changes
    stages = range(problem.num_stages)
    dropped = tuple(problem.dropping[stage].net for stage in stages)
    missing = [max(0.0, changes[4 * s + FORWARD].net - dropped[s]) for s in stages]
    relaxed = replace(
        costs,
        after_forward=dropped,
        during_forward=tuple(
            min(changes[4 * s + FORWARD].rise, problem.dropping[s].rise) for s in stages
        ),
        during_input=tuple(missing[s] + changes[4 * s + INPUT].rise for s in stages),
        during_backward=tuple(missing[s] + changes[4 * s + FULL].rise for s in stages),
    )
    return Problem.of(
        relaxed,
        problem.placement,
        problem.num_microbatches,
        memory=problem.caps,
        clock=problem.clock,
    )


def trade_off(problem: Problem) -> float:
    """Return a bound for any number of recomputations: each takes time, or saves waits.

    See `_Flight`. If a rank recomputes `n` microbatches, it is busy for longer. If it recomputes
    fewer, it can have fewer in flight, and waits more often until one comes back. The least over n
    of the larger of both times is a bound.
    """
    if problem.sequence or problem.num_microbatches > _MOST_MICROBATCHES:
        return 0.0
    times = _Times(problem)
    return max(
        (
            _Flight(problem, stage).bound(times)
            for stage, rank in enumerate(problem.placement.ranks)
            if problem.caps[rank] < inf
        ),
        default=0.0,
    )


class _Times:
    """The least times of actions and of ways through the pipeline."""

    def __init__(self, problem: Problem) -> None:
        durations = problem.durations
        stages = range(problem.num_stages)
        self.problem = problem
        self.forward = [
            durations[4 * s + FORWARD] * (1 - problem.costs.overlap_saving) for s in stages
        ]
        self.input = [min(durations[4 * s + INPUT], durations[4 * s + FULL]) for s in stages]
        self.backward = [
            min(durations[4 * s + INPUT] + durations[4 * s + WEIGHT], durations[4 * s + FULL])
            for s in stages
        ]
        self.first = [0.0]
        for stage in stages[1:]:
            sent = self.first[-1] + self.forward[stage - 1]
            self.first.append(sent + problem.delays[stage - 1])

    def round_trip(self, stage: int, other: int) -> float:
        """Return the time from the start of F on `stage` to the end of I on `other`."""
        last = self.problem.num_stages - 1
        there = self.first[last] - self.first[stage] + self.forward[last]
        return there + sum(self.input[other:]) + sum(self.problem.delays[other:])

    def after_last(self, stage: int) -> float:
        """Return the time from the start of the last F on `stage` to the end of the step."""
        ranks, offsets = self.problem.placement.ranks, self.problem.offsets
        return max(
            self.round_trip(stage, other)
            + self.backward[other]
            - self.input[other]
            - offsets[ranks[other]]
            for other in range(self.problem.num_stages)
        )

    def busy(self, rank: int) -> float:
        """Return when a rank ends that is never idle after its first start."""
        stages = self.problem.stages_of[rank]
        each = sum(self.forward[s] + self.backward[s] for s in stages)
        start = self.first[stages[0]] - self.problem.offsets[rank]
        return start + self.problem.num_microbatches * each


class _Flight:
    """The microbatches between F and I on a stage, in the order of their F.

    From its F to its I, a microbatch holds what the F up to this stage of its rank have left, or
    less if it is recomputed. Take F of microbatch j, and the last microbatch i before it whose I is
    over by then. All after i are in flight, so memory limits their number, and i was begun a round
    trip before. So a chain of round trips leads from the last F to one of the first. Its links are
    disjoint, so the recomputed microbatches are divided among them.
    """

    def __init__(self, problem: Problem, stage: int) -> None:
        rank = problem.placement.ranks[stage]
        held = [s for s in problem.stages_of[rank] if s <= stage]
        kept, dropped = problem.costs.after_forward, [change.net for change in problem.dropping]
        saving = [s for s in held if dropped[s] < kept[s]]
        forward, dropping = problem.changes[4 * stage + FORWARD], problem.dropping[stage]
        extra = min(forward.rise - forward.net, dropping.rise - dropping.net)
        self.stage, self.rank = stage, rank
        self.room = problem.caps[rank] * ROUNDING - extra
        self.kept = sum(kept[s] for s in held)
        self.saved = sum(kept[s] - dropped[s] for s in held)
        self.time = min((problem.costs.recompute[s] for s in saving), default=0.0)
        self.num_microbatches = problem.num_microbatches

    def most(self, recomputed: int) -> int:
        """Return how many microbatches can be in flight, if this many of them are recomputed."""
        most, least = self.num_microbatches, self.kept - self.saved
        if least > 0 and self.room / least < recomputed:
            return floor(self.room / least)
        if self.kept <= 0:
            return most
        return floor(min(most, (self.room + recomputed * self.saved) / self.kept))

    def bound(self, times: _Times) -> float:
        """Return the least time of the rank over all numbers of recomputed microbatches."""
        round_trip, tail = times.round_trip(self.stage, self.stage), times.after_last(self.stage)
        busy, least = times.busy(self.rank), inf
        most = [self.most(x) for x in range(self.num_microbatches + 1)]
        starts: list[list[float]] = []
        for recomputed in range(self.num_microbatches + 1):
            starts.append(self._starts(times, starts, most, round_trip))
            works = busy + recomputed * self.time
            waits = starts[-1][-1] + tail
            least = min(least, max(works, waits))
            if works >= waits:
                break
        return least

    def _starts(
        self, times: _Times, fewer: list[list[float]], most: list[int], round_trip: float
    ) -> list[float]:
        """Return the earliest start of each F, if one more microbatch is recomputed than before.

        `fewer` has the same for 0, 1, … recomputed microbatches.
        """
        total, own = len(fewer), times.forward[self.stage]
        starts: list[float] = []
        rows = [*fewer, starts]
        for mb in range(self.num_microbatches):
            # `x` of them are in the last link. If it cannot have any microbatch, F cannot run.
            links = ((rows[total - x], most[x]) for x in range(total + 1))
            waits = min(
                inf if count <= 0 else row[mb - count] + round_trip if mb >= count else 0.0
                for row, count in links
            )
            starts.append(max(times.first[self.stage] + mb * own, waits))
        return starts

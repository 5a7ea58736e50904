"""Make orders by letting each rank choose its next action as time passes.

A rank that is free runs the first action of its preferences that is ready. For example, it runs an
input backward, otherwise a forward if that is allowed, otherwise a weight backward unless something
more urgent is about to arrive. The rules by which it chooses are a `Policy`. The best one depends
on the costs, so many are tried.

Memory never blocks the ranks: an action runs only if its rank could still finish its microbatches
afterwards: first the weight backwards that wait, then one microbatch after the other, from the
oldest on.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from penstock.passes.held_memory import ROUNDING
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Code, Order, Problem


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules by which ranks choose their next actions."""

    preference: tuple[tuple[Code, ...], ...]
    """By rank: the actions to choose from, the most urgent first. With FULL, backwards are full."""
    ahead: tuple[int, ...]
    """By stage: how many microbatches may be between their forward and their input backward."""
    patience: tuple[float, ...]
    """By rank: the share of a weight backward by which it may delay a more urgent action.

    With 0, a rank waits rather than delay that action; with 1, it never waits.
    """
    keeps_room: bool = False
    """True if a forward must leave room for its microbatch on all later stages of its rank."""
    keeps: tuple[int, ...] = ()
    """By stage, if forwards may be recomputed: how many microbatches in flight keep their values.

    The others are recomputed, as are those for which there is no room.
    """
    reach: int = 1
    """How early an idle rank recomputes: this many of the next backwards of a stage.

    With 0, it waits until the gradient is on its way.
    """


def dispatch(problem: Problem, policy: Policy) -> list[Order]:
    """Return the orders that result if ranks choose by `policy`."""
    return _Dispatch(problem, policy).run()


def run_ranks(
    problem: Problem,
    choose: Callable[[float, int], tuple[Code | None, float]],
    start: Callable[[Code, int, float], tuple[float, int | None]],
) -> None:
    """Advance from one time at which a rank is free to the next, until all ranks are done.

    `choose(now, rank)` returns what a rank runs, if anything, and when the next message for it
    arrives. `start(code, rank, now)` starts that; it returns its end, and the stage that takes its
    message, if any.
    """
    ranks = problem.placement.ranks
    free = [(0.0, rank) for rank in range(problem.num_ranks)]
    is_parked = [False] * problem.num_ranks
    while free:
        now, rank = heapq.heappop(free)
        code, next_arrival = choose(now, rank)
        if code is None:
            if next_arrival < inf:
                heapq.heappush(free, (next_arrival, rank))
            else:
                is_parked[rank] = True  # Until a message is sent to it.
            continue
        end, receiver = start(code, rank, now)
        heapq.heappush(free, (end, rank))
        if receiver is not None and is_parked[ranks[receiver]]:
            is_parked[ranks[receiver]] = False
            heapq.heappush(free, (now, ranks[receiver]))


class _Dispatch:
    """The state of the ranks while they choose."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        num_stages, num_ranks = problem.num_stages, problem.num_ranks
        self.problem, self.policy = problem, policy
        self.orders: list[Order] = [[] for _ in range(num_ranks)]
        # By stage: when the activations and gradients made so far arrive,
        self.activations: list[list[float]] = [[] for _ in range(num_stages)]
        self.gradients: list[list[float]] = [[] for _ in range(num_stages)]
        self.activations[0] = [0.0] * problem.num_microbatches
        # the numbers of forwards and input backwards that were run,
        self.forwards, self.inputs = [0] * num_stages, [0] * num_stages
        # and the microbatches whose weight backward waits, as places in the sequence.
        self.waiting: list[deque[int]] = [deque() for _ in range(num_stages)]
        self.times, self.changes = problem.named.times, problem.named.changes
        # By place in the sequence: what names the microbatch in a code, its scale, and that of all
        # before it.
        sequence = problem.sequence or (0,) * problem.num_microbatches
        self.names = [4 * num_stages * mb for mb in sequence]
        scales = problem.costs.memory_scale
        self.is_sized = any(scale != 1 for scale in scales)
        self.sizes: list[float] = [scales[mb] if scales else 1 for mb in sequence]
        self.sizes_before = list(accumulate(self.sizes, initial=0))
        self.caps = [cap * ROUNDING for cap in problem.caps]
        self.room = list(self.caps)
        self.pending = [0.0] * num_ranks  # What the weight backwards that wait hold.
        # By rank: what a microbatch holds once it has reached the first of its stages, the second …
        kept = problem.costs.after_forward
        self.kept_so_far = [
            list(accumulate(kept[stage] for stage in stages)) for stages in problem.stages_of
        ]
        self.needs_from = [problem.needs_from(rank) for rank in range(num_ranks)]
        self.backwards_need_room = any(
            change.rise for code, change in enumerate(problem.changes) if code & 3 != FORWARD
        )
        self.needs_of_backwards = [problem.needs_of_backwards(rank) for rank in range(num_ranks)]

    def run(self) -> list[Order]:
        """Run until all ranks are done."""
        run_ranks(self.problem, self._choose, self._start)
        return self.orders

    def _choose(self, now: float, rank: int) -> tuple[int | None, float]:
        """Return what `rank` runs now, if anything, and when the next message for it arrives."""
        next_arrival = inf
        for code in self.policy.preference[rank]:
            stage, kind = code >> 2, code & 3
            if kind == WEIGHT:
                if self.waiting[stage]:
                    duration = self.times[code + self.names[self.waiting[stage][0]]]
                    if now + duration - next_arrival <= self.policy.patience[rank] * duration:
                        return code, now
                continue
            if kind == FORWARD:
                index, arrivals = self.forwards[stage], self.activations[stage]
                if (
                    index >= len(arrivals)
                    or index - self.inputs[stage] >= self.policy.ahead[stage]
                    or not self._has_room(rank, stage)
                ):
                    continue
            else:
                index, arrivals = self.inputs[stage], self.gradients[stage]
                if index >= len(arrivals):
                    continue
            arrival = arrivals[index]
            if arrival <= now:
                fitting = code if kind == FORWARD else self._backward_with_room(code, rank)
                if fitting is None:
                    continue  # Until weight backwards have freed memory.
                return fitting, now
            if arrival < next_arrival:
                next_arrival = arrival
        return None, next_arrival

    def _backward_with_room(self, code: Code, rank: int) -> Code | None:
        """Return the full or input backward of a stage for which there is room, if possible `code`.

        After an input backward there must be room for the weight backwards that wait.
        """
        room, changes = self.room[rank], self.changes
        if room == inf:
            return code
        name = self.names[self.inputs[code >> 2]]
        first, full, second = code & ~3 | INPUT, code & ~3 | FULL, code & ~3 | WEIGHT
        for wanted in (first, full) if code == first else (full, first):
            rise, net = changes[wanted + name]
            if wanted == first and room >= rise:
                rise = net + max(changes[second + name].rise, self._rise_of_weights(rank))
            if rise <= room:
                return wanted
        return None

    def _rise_of_weights(self, rank: int) -> float:
        """Return the most memory that a weight backward needs of those that wait."""
        if not self.backwards_need_room:
            return 0.0
        return max(
            (
                self.changes[4 * stage + WEIGHT + self.names[place]].rise
                for stage in self.problem.stages_of[rank]
                for place in self.waiting[stage]
            ),
            default=0.0,
        )

    def _has_room(self, rank: int, stage: int) -> bool:
        """Return whether `rank` could run a forward of `stage` and finish all that it has begun.

        The oldest microbatch that has reached one of its stages waits only for those ahead of it.
        When these are done, with their weight backwards, the rank holds what that microbatch and
        all after it have left. It then needs room for the later stages of that microbatch. If
        microbatches have different sizes, the same must hold for each, not only for the oldest.
        """
        stages, kept = self.problem.stages_of[rank], self.kept_so_far[rank]
        needs, place = self.needs_from[rank], self.forwards[stage]
        needed, net = self.changes[4 * stage + self.names[place]]
        if self.policy.keeps_room:
            needed = max(needed, net + needs[stages.index(stage) + 1] * self.sizes[place])
        if needed > self.room[rank]:
            return False
        if self.backwards_need_room:
            room = self.room[rank] - net
            if self._rise_of_weights(rank) > room:
                return False
            if self._needed_by_backwards(rank, stage) > room + self.pending[rank]:
                return False
        if self.is_sized:
            return self._can_finish_each(rank, stage)
        held = 0.0
        for index, (here, after) in enumerate(pairwise(stages)):
            waiting = self.forwards[here] - self.forwards[after]
            waiting += (here == stage) - (after == stage)
            held += waiting * kept[index]
            if waiting and held + needs[index + 1] > self.caps[rank]:
                return False
        return True

    def _can_finish_each(self, rank: int, stage: int) -> bool:
        """Return whether there is room for each microbatch in turn, after an F of `stage`."""
        stages, kept = self.problem.stages_of[rank], self.kept_so_far[rank]
        needs, before = self.needs_from[rank], self.sizes_before
        held = 0.0  # By microbatches that have not reached the next stage: those after all others.
        for index, (here, after) in enumerate(pairwise(stages)):
            last = self.forwards[here] + (here == stage)
            first = self.forwards[after] + (after == stage)
            for oldest in range(first, last):
                left = held + (before[last] - before[oldest]) * kept[index]
                if left + needs[index + 1] * self.sizes[oldest] > self.caps[rank]:
                    return False
            held += (before[last] - before[first]) * kept[index]
        return True

    def _needed_by_backwards(self, rank: int, stage: int) -> float:
        """Return what the next backwards of `rank` need, after one more forward of `stage`."""
        stages, needs = self.problem.stages_of[rank], self.needs_of_backwards[rank]
        needed = 0.0
        arrived = self.forwards[stages[-1]] + (stage == stages[-1])
        for index in reversed(range(len(stages))):
            done = self.inputs[stages[index]]
            if arrived > done:
                largest = max(self.sizes[done:arrived]) if self.is_sized else 1
                needed = max(needed, needs[index] * largest)
            arrived = done
        return needed

    def _start(self, code: int, rank: int, now: float) -> tuple[float, int | None]:
        """Start an action; return its end, and the stage that takes its message, if any."""
        stage, kind = code >> 2, code & 3
        if kind == FORWARD:
            place = self.forwards[stage]
        elif kind == WEIGHT:
            place = self.waiting[stage].popleft()
        else:
            place = self.inputs[stage]
        name = self.names[place]
        delays, net = self.problem.delays, self.changes[code + name].net
        end = now + self.times[code + name]
        self.orders[rank].append(code)
        self.room[rank] -= net
        if kind == FORWARD:
            self.forwards[stage] = place + 1
            if stage == self.problem.num_stages - 1:
                self.gradients[stage].append(end)
                return end, None
            self.activations[stage + 1].append(end + delays[stage])
            return end, stage + 1
        if kind == WEIGHT:
            self.pending[rank] += net
            return end, None
        self.inputs[stage] = place + 1
        if kind == INPUT:
            self.waiting[stage].append(place)
            self.pending[rank] -= self.changes[4 * stage + WEIGHT + name].net
        if stage == 0:
            return end, None
        self.gradients[stage - 1].append(end + delays[stage - 1])
        return end, stage - 1

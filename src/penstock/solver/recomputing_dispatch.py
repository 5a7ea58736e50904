"""Make orders by letting each rank choose, where forwards may be recomputed.

As in `dispatching`, with two more choices: whether a forward keeps its values, and when to
recompute what it has dropped. A rank recomputes when the gradient is on its way, or in idle time
before that.

Memory never blocks the ranks: see `_can_finish`.
"""

from collections import deque
from math import inf

from penstock.passes.held_memory import ROUNDING, Change
from penstock.solver.dispatching import Policy, run_ranks
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Code, Order, Problem


def dispatch_with_drops(problem: Problem, policy: Policy) -> list[Order]:
    """Return the orders that result if ranks choose by `policy`, some with recomputations."""
    dispatch = _Dispatch(problem, policy)
    run_ranks(problem, dispatch.choose, dispatch.start)
    return dispatch.orders


class _Dispatch:
    """The state of the ranks while they choose."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        num_stages, num_ranks = problem.num_stages, problem.num_ranks
        self.problem, self.policy = problem, policy
        self.keeps = policy.keeps or (problem.num_microbatches,) * num_stages
        self.orders: list[Order] = [[] for _ in range(num_ranks)]
        # By stage: when the activations and gradients made so far arrive,
        self.activations: list[list[float]] = [[] for _ in range(num_stages)]
        self.gradients: list[list[float]] = [[] for _ in range(num_stages)]
        self.activations[0] = [0.0] * problem.num_microbatches
        # the numbers of forwards and input backwards that were run,
        self.forwards, self.inputs = [0] * num_stages, [0] * num_stages
        # and the microbatches whose weight backward waits, or that were dropped and not recomputed
        # yet, as places in the sequence.
        self.waiting: list[deque[int]] = [deque() for _ in range(num_stages)]
        self.dropped: list[deque[int]] = [deque() for _ in range(num_stages)]
        self.sizes = problem.sizes
        self.room = [cap * ROUNDING for cap in problem.caps]
        self.pending = [0.0] * num_ranks  # What the weight backwards that wait hold.
        # What backwards need, and what a microbatch needs after its first n forwards on a rank.
        self.least_rise = [problem.least_rise(stage) for stage in range(num_stages)]
        self.needs = [problem.needs_with_drops(rank) for rank in range(num_ranks)]
        # No microbatch needs more than this on a rank beyond what is held.
        self.most_needed = [
            max(self.sizes)
            * sum(
                (problem.recomputing[stage].rise + self.least_rise[stage] for stage in stages),
                needs[0],
            )
            for needs, stages in zip(self.needs, problem.stages_of, strict=True)
        ]

    def choose(self, now: float, rank: int) -> tuple[Code | None, float]:
        """Return what `rank` runs now, if anything, and when the next message for it arrives."""
        next_arrival = inf
        for code in self.policy.preference[rank]:
            stage, kind = code >> 2, code & 3
            if kind == WEIGHT:
                if self.waiting[stage] and self._may_delay(rank, code, now, next_arrival):
                    return code, now
                continue
            is_forward = kind == FORWARD
            index = self.forwards[stage] if is_forward else self.inputs[stage]
            arrivals = self.activations[stage] if is_forward else self.gradients[stage]
            if index >= len(arrivals):
                continue
            if is_forward and index - self.inputs[stage] >= self.policy.ahead[stage]:
                continue
            if not is_forward and self.dropped[stage] and self.dropped[stage][0] == index:
                code = self.problem.recomputation(stage, index)
            elif arrivals[index] > now:
                next_arrival = min(next_arrival, arrivals[index])
                continue
            fitting = self._fitting(code, rank, stage)
            if fitting is not None:
                return fitting, now
        early = self._recompute_early(rank)
        if early is not None and self._may_delay(rank, early, now, next_arrival):
            return early, now
        return None, next_arrival

    def _may_delay(self, rank: int, code: Code, now: float, next_arrival: float) -> bool:
        duration = self.problem.named.times[self.problem.name(code, self._place(code))]
        return now + duration - next_arrival <= self.policy.patience[rank] * duration

    def _recompute_early(self, rank: int) -> Code | None:
        """Return the recomputation for one of the next backwards, nearest to the loss first."""
        for stage in reversed(self.problem.stages_of[rank]):
            dropped = self.dropped[stage]
            if dropped and dropped[0] - self.inputs[stage] < self.policy.reach:
                code = self.problem.recomputation(stage, dropped[0])
                if self._fits(code, rank):
                    return code
        return None

    def _fitting(self, code: Code, rank: int, stage: int) -> Code | None:
        """Return an action like `code` for which there is room, if possible `code` itself.

        A forward may keep its values or drop them, and a backward may be full or split.
        """
        if code & 3 == FORWARD:
            return self._fitting_forward(code, rank, stage)
        if self.problem.recomputes(code):
            return code if self._fits(code, rank) else None
        first, full = code & ~3 | INPUT, code & ~3 | FULL
        for wanted in (first, full) if code == first else (full, first):
            if self._fits(wanted, rank):
                return wanted
        return None

    def _fitting_forward(self, code: Code, rank: int, stage: int) -> Code | None:
        index, dropped = self.forwards[stage], self.dropped[stage]
        num_kept = index - self.inputs[stage] - len(dropped)
        may_drop = self.room[rank] < inf and self.problem.saves_by_dropping(stage)
        wants_drop = num_kept >= self.keeps[stage]
        for drops in (wants_drop, not wants_drop) if may_drop else (False,):
            if drops:
                dropped.append(index)
            if self._fits(code, rank):
                return code
            if drops:
                dropped.pop()
        return None

    def _fits(self, code: Code, rank: int) -> bool:
        """Return whether `rank` has room for an action, and can then finish all it has begun."""
        room = self.room[rank]
        if room == inf:
            return True
        place = self._place(code)
        rise, net = self._change(code, place)
        if rise > room:
            return False
        if net <= 0 and code & 3 == FULL:
            return True  # It only frees memory, and all that waits could be finished before it.
        self._count(code, rank, place, 1)
        can_finish = self._can_finish(rank)
        self._count(code, rank, place, -1)
        return can_finish

    def _place(self, code: Code) -> int:
        """Return the place in the sequence of the next microbatch of an action."""
        if self.problem.recomputes(code):
            return self.problem.recomputed(code)[1]
        stage, kind = code >> 2, code & 3
        if kind == WEIGHT:
            return self.waiting[stage][0]
        return self.forwards[stage] if kind == FORWARD else self.inputs[stage]

    def _change(self, code: Code, place: int) -> Change:
        problem = self.problem
        if problem.recomputes(code):
            change = problem.recomputing[problem.recomputed(code)[0]]
        elif code & 3 == FORWARD and place in self.dropped[code >> 2]:
            change = problem.dropping[code >> 2]
        else:
            change = problem.changes[code]
        return change.times(self.sizes[place])

    def _count(self, code: Code, rank: int, place: int, sign: int) -> None:
        """Count an action as run, or with -1 as not run."""
        problem, kind = self.problem, code & 3
        self.room[rank] -= sign * self._change(code, place).net
        stage = code >> 2
        if kind == WEIGHT:  # Or a recomputation.
            is_weight = not problem.recomputes(code)
            first = self.waiting[stage] if is_weight else self.dropped[stage % problem.num_stages]
            if sign > 0:
                first.popleft()
            else:
                first.appendleft(place)
            if is_weight:
                self.pending[rank] += sign * self._change(code, place).net
        elif kind == FORWARD:
            self.forwards[stage] += sign
        else:
            self.inputs[stage] += sign
            if kind == INPUT:
                left = problem.costs.after_input[stage] * self.sizes[place]
                self.pending[rank] += sign * left
                if sign > 0:
                    self.waiting[stage].append(place)
                else:
                    self.waiting[stage].pop()

    def _can_finish(self, rank: int) -> bool:
        """Return whether `rank` has room to finish all that it has begun, and then to go on.

        First it runs the weight backwards that wait. Then it finishes one microbatch after the
        other, from the oldest on: its forwards on later stages, and its backwards, with their
        recomputations. All ranks can do so, in the same order of microbatches, so none waits for
        ever.
        """
        room, stages = self.room[rank], self.problem.stages_of[rank]
        for stage in stages:
            largest = max((self.sizes[place] for place in self.waiting[stage]), default=0.0)
            if self.problem.changes[4 * stage + WEIGHT].rise * largest > room:
                return False
        room += self.pending[rank]
        for mb in range(self.inputs[stages[0]], self.forwards[stages[0]]):
            if room >= self.most_needed[rank]:
                return True
            needed, freed = self._rest(rank, mb)
            if needed > room:
                return False
            room += freed
        return True

    def _rest(self, rank: int, mb: int) -> tuple[float, float]:
        """Return what a microbatch that has begun needs until it ends, and what that frees."""
        problem, stages = self.problem, self.problem.stages_of[rank]
        begun = sum(self.forwards[stage] > mb for stage in stages)
        needed, net = self.needs[rank][begun], 0.0
        for stage in reversed(stages[:begun]):
            if self.inputs[stage] > mb:
                continue
            if mb in self.dropped[stage]:
                needed = max(needed, net + problem.recomputing[stage].rise)
                net += problem.recomputing[stage].net
            needed = max(needed, net + self.least_rise[stage])
            net -= problem.costs.after_forward[stage]
        return needed * self.sizes[mb], -net * self.sizes[mb]

    def start(self, code: Code, rank: int, now: float) -> tuple[float, int | None]:
        """Start an action; return its end, and the stage that takes its message, if any."""
        place = self._place(code)
        end = now + self.problem.named.times[self.problem.name(code, place)]
        self.orders[rank].append(code)
        self._count(code, rank, place, 1)
        stage, kind, delays = code >> 2, code & 3, self.problem.delays
        if kind == WEIGHT:  # Or a recomputation: neither sends a message.
            return end, None
        if kind == FORWARD:
            if stage == self.problem.num_stages - 1:
                self.gradients[stage].append(end)
                return end, None
            self.activations[stage + 1].append(end + delays[stage])
            return end, stage + 1
        if stage == 0:
            return end, None
        self.gradients[stage - 1].append(end + delays[stage - 1])
        return end, stage - 1

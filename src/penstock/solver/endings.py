"""Make the end of orders anew: what each rank runs after its last forward.

Memory no longer grows there, so each W can wait, and what counts is that no I comes late. A free
rank runs the I of its latest stage that has arrived, as that has the longest way to go. It does not
start anything that would delay the I of a later stage. A W may delay an I of its first stage, as
long as that I can still start in time for a target.
"""

import heapq
from collections.abc import Sequence
from math import inf

from penstock.solver.evaluation import fits
from penstock.solver.named_codes import FORWARD, INPUT, WEIGHT
from penstock.solver.problem import Code, Order, Problem


def finish(
    problem: Problem, orders: Sequence[Order], latest: Sequence[Sequence[float]]
) -> list[Order] | None:
    """Return orders with the same actions, in another order after the last forward of each rank.

    There are no full backwards among them. `latest` are the latest starts of I, by stage and
    microbatch. The result is None if it does not fit, as backwards may need memory while they run.
    """
    made = _Ending(problem, orders, latest).run()
    return made if all(fits(problem, rank, order) for rank, order in enumerate(made)) else None


class _Ending:
    """The state of the ranks while they run."""

    def __init__(
        self, problem: Problem, orders: Sequence[Order], latest: Sequence[Sequence[float]]
    ) -> None:
        num_stages = problem.num_stages
        self._problem, self._latest = problem, latest
        self._kept = [order[: _after_forwards(order)] for order in orders]
        self._left = [len(order) for order in orders]
        self._made: list[Order] = [[] for _ in orders]
        # By stage: when the activations and gradients sent so far arrive, and what was run.
        self._activations: list[list[float]] = [[] for _ in range(num_stages)]
        self._activations[0] = [0.0] * problem.num_microbatches
        self._gradients: list[list[float]] = [[] for _ in range(num_stages)]
        self._counts = [0] * (4 * num_stages)

    def run(self) -> list[Order]:
        """Advance from one time at which a rank is free to the next, until all ranks are done."""
        ranks = self._problem.placement.ranks
        wakes = [0.0] * len(self._made)
        is_idle = [False] * len(self._made)
        times = [(0.0, rank) for rank in range(len(self._made))]
        while times:
            now, rank = heapq.heappop(times)
            if now != wakes[rank] or not self._left[rank]:
                continue  # It has run since.
            is_kept = len(self._made[rank]) < len(self._kept[rank])
            code, wakes[rank] = (self._follow if is_kept else self._choose)(now, rank)
            is_idle[rank] = code is None
            if code is not None:
                wakes[rank] = now + self._problem.durations[code]
                receiver = self._run(code, rank, wakes[rank])
                if receiver is not None and is_idle[ranks[receiver]]:
                    wakes[ranks[receiver]] = now  # To choose again, knowing of the message.
                    heapq.heappush(times, (now, ranks[receiver]))
            heapq.heappush(times, (wakes[rank], rank))
        return self._made

    def _follow(self, now: float, rank: int) -> tuple[Code | None, float]:
        """Return the next action of the given order if it can run now, and when it can."""
        code = self._kept[rank][len(self._made[rank])]
        arrival = self._arrival(code)
        return (code if arrival <= now else None), arrival

    def _choose(self, now: float, rank: int) -> tuple[Code | None, float]:
        """Return what `rank` runs now, if anything, and when the next message for it arrives."""
        durations, stages = self._problem.durations, self._problem.stages_of[rank]
        awaited, latest = inf, inf  # When a more urgent I arrives, and when it must start.
        for stage in reversed(stages):
            code = 4 * stage + INPUT
            if self._counts[code] == self._problem.num_microbatches:
                continue
            arrival, end = self._arrival(code), now + durations[code]
            if arrival <= now and (end <= awaited or end <= latest):
                return code, now
            if now < arrival < inf:
                awaited = min(awaited, arrival)
                own = self._latest[stage][self._counts[code]] if stage == stages[0] else -inf
                latest = min(latest, own)
        for stage in reversed(stages):
            code = 4 * stage + WEIGHT
            if self._counts[code] < self._counts[4 * stage + INPUT]:
                end = now + durations[code]
                if end <= awaited or end <= latest:
                    return code, now
        return None, awaited

    def _arrival(self, code: Code) -> float:
        """Return when the next action of this kind can start; infinite if that is not known."""
        if code & 3 == WEIGHT:
            return 0.0
        arrivals = (self._activations if code & 3 == FORWARD else self._gradients)[code >> 2]
        index = self._counts[code]
        return arrivals[index] if index < len(arrivals) else inf

    def _run(self, code: Code, rank: int, end: float) -> int | None:
        """Record that an action was started; return the stage that takes its message, if any."""
        stage, kind = code >> 2, code & 3
        delays = self._problem.delays
        self._made[rank].append(code)
        self._left[rank] -= 1
        self._counts[code] += 1
        if kind == FORWARD and stage < self._problem.num_stages - 1:
            self._activations[stage + 1].append(end + delays[stage])
            return stage + 1
        if kind == FORWARD:
            self._gradients[stage].append(end)
        elif kind == INPUT and stage > 0:
            self._gradients[stage - 1].append(end + delays[stage - 1])
            return stage - 1
        return None


def _after_forwards(order: Order) -> int:
    """Return the place after the last forward."""
    return max(index for index, code in enumerate(order) if code & 3 == FORWARD) + 1

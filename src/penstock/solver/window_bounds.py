"""Lower bounds on the time of a rank that is short of memory, by what it does in a window.

The window of a rank opens when its first backward starts, and closes when its last F starts. The
first backward is on the last of its stages, so a microbatch has been through all stages after it:
the window opens no earlier than that takes, at `opens`. The last F is on that stage too, and its
microbatch has the whole way back before it: at least `after` passes from then to the end.

Before the window opens, a rank can only run F and R, and holds all that they leave. When it closes,
what it has not run yet is held too: the values of a microbatch, or its inputs if it is dropped, or
what its W needs. So memory limits what can be done outside of the window, and the rest of the work
must be done inside. A recomputation allows more outside, and is work itself.

With `work` for all that a rank runs, recomputations included, `before` and `behind` for what it
runs before and after the window, and `begins` for its earliest start, its end is no earlier than
[1] begins + work
[2] opens + work - before
[3] begins + work - behind + after
[4] opens + work - before - behind + after, if the window opens before it closes.

So it is no earlier than any mean of these, with weights from 0 to 1: a for `before`, and c for
`behind`:

    begins + a * (opens - begins) + c * after + work - a * before - c * behind

Each microbatch adds its own share to work, before and behind, and to what is held when the window
opens and closes.
Let prices be charged for that memory: what is held costs more than it may only if it exceeds the
cap. So for any such weights and prices, let each microbatch do what makes its share
least; the sum of these, minus the price of the caps, is a bound (Lagrange). It holds for any order
of the microbatches, alike or not. The best weights and prices are found step by step.

If the window closes before it opens, all microbatches are held when it opens: see `_all_at_once`.
"""

from collections.abc import Sequence
from math import inf
from operator import mul
from typing import NamedTuple

from penstock.passes.held_memory import ROUNDING
from penstock.solver.highest_point import Vector, highest
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Problem

_NUM_STEPS = 120  # On the way to the best weights and prices.


class _Share(NamedTuple):
    """The least times of a microbatch on a stage, and what it holds."""

    forward: float
    input: float
    weight: float
    again: float
    """The time of R; infinite if forwards may not be recomputed."""
    kept: float
    dropped: float
    left: float
    """What it holds from I to W."""

    @property
    def work(self) -> float:
        return self.forward + self.input + self.weight


class _Choice(NamedTuple):
    """What a microbatch does on a stage, or on several: its costs, and how they depend on prices.

    `value` is its time and what it holds, both at their prices; `slope` says how the value changes
    with weights and prices.
    """

    value: float
    slope: Vector


def window_bound(problem: Problem) -> float:
    """Return a time that no schedule can beat, by the clock; 0 if no rank's memory is limited."""
    return max(
        (
            _Rank(problem, rank).bound()
            for rank in range(problem.num_ranks)
            if problem.caps[rank] < inf
        ),
        default=0.0,
    )


class _Rank:
    """The window of one rank."""

    def __init__(self, problem: Problem, rank: int) -> None:
        self._stages = problem.stages_of[rank]
        mbs = range(problem.num_microbatches) if problem.sequence else range(1)
        ways = [_Way(problem, rank, mb) for mb in mbs]
        self._begins = min(way.begins for way in ways)
        self._opens = min(way.opens for way in ways)
        self._after = min(way.after for way in ways)
        shares = [tuple(way.shares[stage] for stage in self._stages) for way in ways]
        # The microbatches that are alike, and how many they are.
        copies = 1 if problem.sequence else problem.num_microbatches
        self._groups = [(copies * shares.count(one), one) for one in dict.fromkeys(shares)]
        last = self._stages[-1]
        self._last_forward = max(one[-1].forward for one in shares)
        smallest = min(problem.sizes)
        changes = problem.changes[4 * last : 4 * last + 4]
        extras = [changes[FORWARD].rise - changes[FORWARD].net]
        if problem.may_recompute:
            extras.append(problem.dropping[last].rise - problem.dropping[last].net)
        cap = problem.caps[rank] * ROUNDING
        self._caps = (
            cap - smallest * min(changes[INPUT].rise, changes[FULL].rise),
            cap - smallest * min(extras),
        )

    def bound(self) -> float:
        """Return the least end of the rank, whether its window is open or not."""
        at_once = self._all_at_once()
        if at_once <= self._begins + self._work():
            return at_once
        times = [one.work for _, shares in self._groups for one in shares]
        kept = [one.kept for _, shares in self._groups for one in shares]
        price = 2 * sum(times) / sum(kept) if sum(kept) > 0 else 1.0
        return min(at_once, highest(self._at, (1.0, 1.0, price, price), _NUM_STEPS))

    def _work(self) -> float:
        return sum(count * one.work for count, shares in self._groups for one in shares)

    def _all_at_once(self) -> float:
        """Return the least end if all F start before the first backward, and are held then.

        What exceeds the cap is dropped, as that is quickest, and recomputed after that moment.
        """
        excess = -self._caps[0]
        forwards, droppable = 0.0, []
        for count, shares in self._groups:
            for one in shares:
                forwards += count * one.forward
                excess += count * one.kept
                saved = one.kept - one.dropped
                if saved > 0 and one.again < inf:
                    droppable.append((one.again / saved, count * saved))
        again = 0.0
        for time, saved in sorted(droppable):
            again += time * max(0.0, min(saved, excess))
            excess -= saved
        if excess > 0:
            return inf
        return self._work() + again + max(self._begins, self._opens - forwards)

    def _at(self, point: Vector) -> tuple[float, Vector]:
        """Return the bound for weights and prices, and its slope; see the module."""
        slopes: Vector = (
            self._opens - self._begins,
            self._after - self._last_forward,
            -self._caps[0],
            -self._caps[1],
        )
        total = self._begins + sum(map(mul, point, slopes))
        for count, shares in self._groups:
            best = _best(shares, point)
            total += count * best.value
            slopes = tuple(x + count * y for x, y in zip(slopes, best.slope, strict=True))
        return total, slopes


class _Way:
    """The times that a microbatch takes to and from a rank, by the clock."""

    def __init__(self, problem: Problem, rank: int, mb: int) -> None:
        stages, delays = problem.stages_of[rank], problem.delays_of(mb)
        shares = [_share(problem, stage, mb) for stage in range(problem.num_stages)]
        last = stages[-1]
        starts = [0.0]
        for one, delay in zip(shares, delays, strict=False):
            starts.append(starts[-1] + one.forward + delay)
        ends = [0.0] * len(shares)  # Of I.
        now = starts[-1] + shares[-1].forward
        for stage in reversed(range(len(shares))):
            ends[stage] = now + shares[stage].input
            now = ends[stage] + (delays[stage - 1] if stage else 0.0)
        self.shares = shares
        # If microbatches differ, a span counts from the rank's own start.
        is_own = bool(problem.sequence) and problem.clock == "span"
        origin = starts[stages[0]] if is_own else problem.offsets[rank]
        offsets = problem.offsets
        self.begins = starts[stages[0]] - origin
        self.opens = ends[last] - shares[last].input - origin
        self.after = max(
            ends[other] + shares[other].weight - starts[last] - (0.0 if is_own else offsets[where])
            for other, where in enumerate(problem.placement.ranks)
            if not is_own or where == rank
        )
        if not is_own:
            self.after += offsets[rank]


def _share(problem: Problem, stage: int, mb: int) -> _Share:
    """Return the share of a microbatch on a stage; see `_Amount` in `solver.bounds` for halves."""
    table, costs = problem.named.times, problem.costs
    code = 4 * (stage + problem.num_stages * mb)
    first, full = table[code + INPUT], table[code + FULL]
    least = min(first, full)
    again = costs.recompute[stage] * (costs.time_scale[stage][mb] if costs.time_scale else 1.0)
    size = costs.memory_scale[mb] if costs.memory_scale else 1.0
    return _Share(
        forward=table[code + FORWARD] * (1 - costs.overlap_saving),
        input=least,
        weight=min(first + table[code + WEIGHT], full) - least,
        again=again if problem.may_recompute else inf,
        kept=costs.after_forward[stage] * size,
        dropped=problem.dropping[stage].net * size,
        left=costs.after_input[stage] * size,
    )


def _best(shares: Sequence[_Share], point: Vector) -> _Choice:
    """Return the best that a microbatch can do on all stages of a rank.

    It has run F on the first of them when the window opens, and I on the last of them when it
    closes, on any number of each.
    """
    count = len(shares)
    choices = {
        (has_begun, is_in_flight): [
            _best_on_stage(one, point, has_begun=has_begun, is_in_flight=is_in_flight)
            for one in shares
        ]
        for has_begun in (False, True)
        for is_in_flight in (False, True)
    }
    options = (
        [choices[n < begun, n < in_flight][n] for n in range(count)]
        for begun in range(count + 1)
        for in_flight in range(count + 1)
    )
    best = min(options, key=_total)
    return _Choice(_total(best), tuple(map(sum, zip(*(one.slope for one in best), strict=True))))


def _total(chosen: Sequence[_Choice]) -> float:
    return sum(one.value for one in chosen)


def _best_on_stage(one: _Share, point: Vector, *, has_begun: bool, is_in_flight: bool) -> _Choice:
    """Return the best choice on a stage: to keep its values or not, and what is left to run."""
    a, c, early, late = point
    before = one.forward * has_begun
    found: list[_Choice] = []
    for again, held in ((0.0, one.kept), (one.again, one.dropped)):
        if again == inf:
            continue
        work, early_held = one.work + again, held * has_begun
        if is_in_flight:
            rest = one.input + one.weight
            rests = [(rest, one.kept), (rest + again, held)]
        else:
            rests = [(0.0, 0.0), (one.weight, one.left)]
        for behind, late_held in rests:
            value = work - a * before - c * behind
            value += early * early_held + late * late_held
            found.append(_Choice(value, (-before, -behind, early_held, late_held)))
    return min(found)

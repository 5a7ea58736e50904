"""A scheduling problem in whole numbers, and the conversion of its times to real ones.

Every time is a number of ticks. If the times have a common unit, the ticks are exact. Otherwise
they are rounded down, so that no order takes longer in ticks than in real time. So a lower bound in
ticks is also a lower bound in real time.

Actions that take no time would leave the order of a rank undecided, and so its memory. With z such
actions, a tick becomes z + 1 ticks and each such action takes one. An order then takes at most z
ticks too long, which is less than one of the former ticks; the division by z + 1 removes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, floor, inf
from operator import add, lt
from typing import TypeAlias

from penstock.costs import CostTable
from penstock.ir import MicrobatchId, Placement, Rank
from penstock.solver.exact.whole_units import to_units
from penstock.solver.named_codes import FORWARD, WEIGHT
from penstock.solver.problem import Problem

_MOST_TICKS = 10**7  # The longest time, if times are rounded.
_MOST_MEMORY = 10**6  # The most that a microbatch holds on a stage, if memory is rounded.
_MOST_AREA = 2**61  # The solver multiplies memory by time, in 64 bits.
_ROUNDING = 1e-9  # Share by which sums of the same numbers may differ.


Row: TypeAlias = tuple[int, ...]
"""A number for each microbatch."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of microbatches on each stage of a rank, and the cap of the rank."""

    rank: Rank
    cap: int
    after_forward: dict[int, Row]
    after_input: dict[int, Row]
    extra: dict[int, tuple[Row, ...]]
    """By stage: what F, I, W and B need besides, only while they run.

    If forwards may be recomputed, also an F that is dropped, and R.
    """
    after_dropping: dict[int, Row]


@dataclass(frozen=True, slots=True)
class TickProblem:
    """The problem to schedule, in ticks."""

    placement: Placement
    num_microbatches: int
    alike: tuple[tuple[MicrobatchId, ...], ...]
    """The microbatches, in groups of those that are alike; if some may be dropped, none are."""
    equal: tuple[tuple[MicrobatchId, ...], ...]
    """The same, in groups of those that have the same costs."""
    forward: tuple[Row, ...]
    backward_input: tuple[Row, ...]
    backward_weight: tuple[Row, ...]
    backward: tuple[Row, ...]
    delay: tuple[int, ...]
    may_fuse: tuple[bool, ...]
    """By stage: True if a full backward can be better than its halves."""
    recompute: tuple[Row, ...]
    """By stage: the time of a recomputation."""
    may_drop: tuple[bool, ...]
    """By stage: True if its forwards may be recomputed, and memory is limited there."""
    offsets: tuple[int, ...]
    """The offset of each rank, rounded up so that times are rounded down.

    If microbatches differ, the offsets by span follow from the order: these are then 0.
    """
    starts_count: bool
    """True if the time of a rank counts from its own first start: by span, if they differ."""
    memory: tuple[RankMemory, ...]
    """The memory of each rank whose cap could be exceeded."""
    tick: float
    ticks_per_unit: int
    num_instant: int
    slack: int = 0
    """The ticks by which a span may be too long, because a rank starts too early.

    That is so if microbatches differ and times were rounded: it is as many as the forwards.
    """

    def to_lower_bound(self, ticks: float) -> float:
        """Return the least real time of any order, if none takes fewer than `ticks`."""
        # Bounds of the solver are whole numbers, which it returns as floats.
        least = ceil(ticks - 1e-6) - self.num_instant - self.slack
        return max(0, ceil(least / self.ticks_per_unit)) * self.tick

    def in_order(self) -> "TickProblem":
        """Return the problem with equal microbatches in order on each stage."""
        return replace(self, alike=self.equal)

    def heads(self) -> list[int]:
        """Return when the first forward of each stage can start."""
        starts = [0]
        for stage, times in enumerate(self.forward[:-1]):
            starts.append(starts[-1] + min(times) + self.delay[stage])
        return starts

    def horizon(self) -> int:
        """Return a time in which all actions could run one after another."""
        total = 0
        rows = (self.forward, self.backward_input, self.backward_weight, self.backward)
        for forwards, inputs, weights, fulls in zip(*rows, strict=True):
            halves = map(sum, zip(inputs, weights, strict=True))
            total += sum(forwards) + sum(map(max, fulls, halves))
        for times, drops in zip(self.recompute, self.may_drop, strict=True):
            total += sum(times) * drops
        return total + 2 * self.num_microbatches * sum(self.delay)

    def as_costs(self) -> CostTable:
        """Return the times in ticks, for the simulator; its sums of whole numbers are exact.

        If microbatches differ and times were rounded, they are only close.
        """
        rows = (self.forward, self.backward_input, self.backward_weight, self.backward)
        forward, first, second, full, again = (
            [row[0] for row in table] for table in (*rows, self.recompute)
        )
        scales = [[time / row[0] for time in row] for row in self.forward]
        return CostTable(
            forward=forward,
            backward_input=first,
            backward_weight=second,
            backward=full,
            recompute=again,
            delay=self.delay,
            time_scale=scales if len(self.alike) > 1 else (),
        )


def to_ticks(problem: Problem) -> TickProblem:
    """Return the problem in ticks; memory without a common unit is rounded down too."""
    placement, num_microbatches = problem.placement, problem.num_microbatches
    delay, num_stages = problem.delays, placement.num_stages
    may_drop = tuple(problem.may_recompute and problem.caps[r] < inf for r in placement.ranks)
    # If microbatches are alike, there are times for one of them.
    num_named, copies = (num_microbatches, 1) if problem.sequence else (1, num_microbatches)
    times = problem.named.times[: 4 * num_stages * num_named]
    # Times that do not occur must not make the ticks shorter.
    recompute = list(times[FORWARD::4])
    if any(may_drop):
        again = problem.named.times[len(times) + WEIGHT :: 4][: len(recompute)]
        recompute = [
            time if may_drop[number % num_stages] else recompute[number]
            for number, time in enumerate(again)
        ]
    tick, ticks = to_units([*times, *delay, *recompute], _MOST_TICKS)
    num_instant = ticks[: len(times)].count(0) * copies
    if any(may_drop):
        num_instant += ticks[-len(recompute) :].count(0) * copies
    scale = num_instant + 1
    scaled = [time * scale or 1 for time in ticks[: len(times)]]
    forward, first, second, full = (
        tuple(
            tuple(scaled[4 * stage + kind :: 4 * num_stages]) * copies
            for stage in range(num_stages)
        )
        for kind in range(4)
    )
    is_exact = all(
        abs(n * tick - time) <= _ROUNDING * time for n, time in zip(ticks, times, strict=False)
    )
    starts_count = bool(problem.sequence) and problem.clock == "span"
    offsets = (0.0,) * placement.num_ranks if starts_count else problem.offsets
    equal = _equal(problem)
    in_ticks = TickProblem(
        placement=placement,
        num_microbatches=num_microbatches,
        alike=tuple((mb,) for mb in range(num_microbatches)) if any(may_drop) else equal,
        equal=equal,
        forward=forward,
        backward_input=first,
        backward_weight=second,
        backward=full,
        delay=tuple(time * scale for time in ticks[len(times) : -len(recompute)]),
        may_fuse=tuple(
            any(map(lt, full[stage], map(add, first[stage], second[stage])))
            or problem.saves_memory(stage)
            for stage in range(num_stages)
        ),
        recompute=tuple(
            tuple(time * scale or 1 for time in ticks[stage - len(recompute) :: num_stages])
            * copies
            for stage in range(num_stages)
        ),
        may_drop=may_drop,
        offsets=tuple(ceil(offset / tick * (1 - _ROUNDING)) * scale for offset in offsets),
        starts_count=starts_count,
        memory=(),
        tick=tick,
        ticks_per_unit=scale,
        num_instant=num_instant,
        slack=0 if is_exact or not starts_count else num_stages * num_microbatches * scale,
    )
    return replace(in_ticks, memory=tuple(_memory(in_ticks, problem)))


def _equal(problem: Problem) -> tuple[tuple[MicrobatchId, ...], ...]:
    if not problem.sequence:
        return (tuple(range(problem.num_microbatches)),)
    costs, groups = problem.costs, dict[object, list[MicrobatchId]]()
    for mb in range(problem.num_microbatches):
        paces = tuple(row[mb] for row in costs.time_scale)
        groups.setdefault((paces, costs.memory_scale[mb : mb + 1]), []).append(mb)
    return tuple(map(tuple, groups.values()))


def _memory(in_ticks: TickProblem, problem: Problem) -> Iterator[RankMemory]:
    """Yield the memory of ranks whose cap is less than all microbatches can need together."""
    costs, num_microbatches = problem.costs, problem.num_microbatches
    sizes = costs.memory_scale or (1,) * num_microbatches
    for rank, cap in enumerate(problem.caps):
        stages = problem.stages_of[rank]
        held = [*(costs.after_forward[s] for s in stages), *(costs.after_input[s] for s in stages)]
        dropped = [costs.after_dropping[stage] for stage in stages]
        extra = [value for stage in stages for value in _extra(problem, stage)]
        num_held = num_microbatches * (len(held) + len(dropped) + len(extra))
        if cap >= sum(held) * sum(sizes) + max(extra) * max(sizes):
            continue
        most = min(_MOST_MEMORY, _MOST_AREA // (in_ticks.horizon() * num_held))
        amounts = [amount * size for amount in (*held, *dropped, *extra) for size in sizes]
        unit, counts = to_units(amounts, max(1, most))
        rows = [counts[n : n + num_microbatches] for n in range(0, len(counts), num_microbatches)]
        by_kind = rows[len(held) + len(dropped) :]
        num_kinds = len(extra) // len(stages)
        yield RankMemory(
            rank=rank,
            cap=floor(cap * (1 + _ROUNDING) / unit),
            after_forward=dict(zip(stages, rows, strict=False)),
            after_input=dict(zip(stages, rows[len(stages) : len(held)], strict=True)),
            extra={
                stage: tuple(by_kind[num_kinds * n : num_kinds * (n + 1)])
                for n, stage in enumerate(stages)
            },
            after_dropping=dict(zip(stages, rows[len(held) :], strict=False)),
        )


def _extra(problem: Problem, stage: int) -> Iterator[float]:
    """Yield what F, I, W, B, a dropped F and R of a stage need only while they run.

    What an F or R leaves is held from its start on.
    """
    forward, *backwards = problem.changes[4 * stage : 4 * stage + 4]
    yield forward.rise - forward.net
    yield from (change.rise for change in backwards)
    if problem.may_recompute:
        for change in (problem.dropping[stage], problem.recomputing[stage]):
            yield change.rise - change.net

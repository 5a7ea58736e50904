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
from math import ceil, floor

from penstock.costs import CostTable
from penstock.ir import Placement, Rank
from penstock.solver.exact.whole_units import to_units
from penstock.solver.problem import FORWARD, Problem

_MOST_TICKS = 10**7  # The longest time, if times are rounded.
_MOST_MEMORY = 10**6  # The most that a microbatch holds on a stage, if memory is rounded.
_MOST_AREA = 2**61  # The solver multiplies memory by time, in 64 bits.
_ROUNDING = 1e-9  # Share by which sums of the same numbers may differ.


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one microbatch on each stage of a rank, and the cap of the rank."""

    rank: Rank
    cap: int
    after_forward: dict[int, int]
    after_input: dict[int, int]
    extra: dict[int, tuple[int, ...]]
    """By stage: what F, I, W and B need besides, only while they run."""


@dataclass(frozen=True, slots=True)
class TickProblem:
    """The problem to schedule, in ticks."""

    placement: Placement
    num_microbatches: int
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    backward: tuple[int, ...]
    delay: tuple[int, ...]
    may_fuse: tuple[bool, ...]
    """By stage: True if a full backward can be better than its halves."""
    offsets: tuple[int, ...]
    """The offset of each rank, rounded up so that times are rounded down."""
    memory: tuple[RankMemory, ...]
    """The memory of each rank whose cap could be exceeded."""
    tick: float
    ticks_per_unit: int
    num_instant: int

    def to_lower_bound(self, ticks: float) -> float:
        """Return the least real time of any order, if none takes fewer than `ticks`."""
        # Bounds of the solver are whole numbers, which it returns as floats.
        least = ceil(ticks - 1e-6) - self.num_instant
        return max(0, ceil(least / self.ticks_per_unit)) * self.tick

    def heads(self) -> list[int]:
        """Return when the first forward of each stage can start."""
        starts = [0]
        for stage, time in enumerate(self.forward[:-1]):
            starts.append(starts[-1] + time + self.delay[stage])
        return starts

    def horizon(self) -> int:
        """Return a time in which all actions could run one after another."""
        halves = map(sum, zip(self.backward_input, self.backward_weight, strict=True))
        longest = map(max, self.backward, halves)
        return self.num_microbatches * (sum(self.forward) + sum(longest) + 2 * sum(self.delay))

    def as_costs(self) -> CostTable:
        """Return the times in ticks, for the simulator; its sums of whole numbers are exact."""
        return CostTable(
            forward=self.forward,
            backward_input=self.backward_input,
            backward_weight=self.backward_weight,
            backward=self.backward,
            delay=self.delay,
        )


def to_ticks(problem: Problem) -> TickProblem:
    """Return the problem in ticks; memory without a common unit is rounded down too."""
    costs, placement, num_microbatches = problem.costs, problem.placement, problem.num_microbatches
    delay = problem.delays
    num_stages = placement.num_stages
    tables = (costs.forward, costs.backward_input, costs.backward_weight, costs.backward)
    tick, ticks = to_units([time for table in (*tables, delay) for time in table], _MOST_TICKS)
    computes = ticks[: 4 * num_stages]
    num_instant = computes.count(0) * num_microbatches
    scale = num_instant + 1
    scaled = [time * scale or 1 for time in computes]
    forward, first, second, full = (
        tuple(scaled[n * num_stages : (n + 1) * num_stages]) for n in range(4)
    )
    in_ticks = TickProblem(
        placement=placement,
        num_microbatches=num_microbatches,
        forward=forward,
        backward_input=first,
        backward_weight=second,
        backward=full,
        delay=tuple(time * scale for time in ticks[4 * num_stages :]),
        may_fuse=tuple(
            full[stage] < first[stage] + second[stage] or problem.saves_memory(stage)
            for stage in range(num_stages)
        ),
        offsets=tuple(ceil(offset / tick * (1 - _ROUNDING)) * scale for offset in problem.offsets),
        memory=(),
        tick=tick,
        ticks_per_unit=scale,
        num_instant=num_instant,
    )
    return replace(in_ticks, memory=tuple(_memory(in_ticks, problem)))


def _memory(in_ticks: TickProblem, problem: Problem) -> Iterator[RankMemory]:
    """Yield the memory of ranks whose cap is less than all microbatches can need together."""
    costs = problem.costs
    for rank, cap in enumerate(problem.caps):
        stages = problem.stages_of[rank]
        held = [*(costs.after_forward[s] for s in stages), *(costs.after_input[s] for s in stages)]
        # What an F leaves is held from its start on, all else counts only while the action runs.
        rises = [problem.changes[4 * s + kind].rise for s in stages for kind in range(4)]
        extra = [
            rise - (costs.after_forward[stages[n // 4]] if n % 4 == FORWARD else 0.0)
            for n, rise in enumerate(rises)
        ]
        num_held = problem.num_microbatches * (len(held) + len(extra))
        if cap >= sum(held) * problem.num_microbatches + max(extra):
            continue
        most = min(_MOST_MEMORY, _MOST_AREA // (in_ticks.horizon() * num_held))
        unit, counts = to_units([*held, *extra], max(1, most))
        by_kind = counts[len(held) :]
        yield RankMemory(
            rank=rank,
            cap=floor(cap * (1 + _ROUNDING) / unit),
            after_forward=dict(zip(stages, counts, strict=False)),
            after_input=dict(zip(stages, counts[len(stages) : len(held)], strict=True)),
            extra={s: tuple(by_kind[4 * n : 4 * n + 4]) for n, s in enumerate(stages)},
        )

"""Reports of timelines: times, bubbles and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from operator import sub
from typing import NamedTuple

from penstock.costs.cost_table import CostTable
from penstock.errors import ScheduleError
from penstock.ir import Action, Rank, Unshard
from penstock.ir.action import (
    BACKWARD_TYPES,
    SHARDING_TYPES,
    Forward,
    compute_parts,
    gathered_stages,
    is_compute,
)
from penstock.passes.held_memory import Held
from penstock.timeline.memory_over_time import (
    MemoryPoint,
    measured_curve,
    memory_curve,
    peak_memory,
)
from penstock.timeline.timeline import Timeline


class Idle(NamedTuple):
    """A rank's idle time within the makespan, by phase.

    Warm-up lasts until the rank's first backward starts. Cool-down begins when its last forward
    has ended and warm-up is over. Without backwards, warm-up ends when its first forward starts.
    """

    warm_up: float
    steady: float
    cool_down: float

    @property
    def total(self) -> float:
        return self.warm_up + self.steady + self.cool_down


class RankReport(NamedTuple):
    """One rank's times and memory."""

    first_start: float
    """The start of its first compute, less the time of the gathers that it waits for."""
    last_end: float
    busy: float
    idle: Idle
    peak_memory: float

    @property
    def span(self) -> float:
        """The time from its first start to the end of its last action."""
        return self.last_end - self.first_start


class TimedAction(NamedTuple):
    """An action with its times."""

    rank: Rank
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The timeline of a schedule, with its times, bubbles and memory; `str()` is a table.

    There are two clocks: `makespan` is the time from the first start to the last end of all ranks;
    `span` is the largest time of a rank from its own first start to its last end. A bubble rate is
    the share of the ranks' time, by one of the clocks, in which they do not compute.
    """

    timeline: Timeline
    costs: CostTable
    ranks: tuple[RankReport, ...]
    measured: tuple[tuple[Held, ...], ...] = ()
    """The bytes measured at each action, by rank; empty if memory was not measured.

    `peak_memory` and `memory` are planned: they follow from the costs.
    """

    @property
    def makespan(self) -> float:
        return max(rank.last_end for rank in self.ranks)

    @property
    def span(self) -> float:
        return max(rank.span for rank in self.ranks)

    @property
    def bubble_by_makespan(self) -> float:
        """The share of the ranks' time in which they do not compute; each has the makespan."""
        return self._bubble(self.makespan)

    @property
    def bubble_by_span(self) -> float:
        """The share of the ranks' time in which they do not compute; each has the span."""
        return self._bubble(self.span)

    def bubble_of(self, rank: Rank) -> float:
        """Return the share of the makespan in which `rank` does not compute."""
        return self.ranks[rank].idle.total / self.makespan if self.makespan > 0 else 0.0

    @property
    def peak_memory(self) -> float:
        """The most that any rank holds."""
        return max(rank.peak_memory for rank in self.ranks)

    def memory(self, rank: Rank) -> list[MemoryPoint]:
        """Return the memory of `rank` over time; each point holds until the next."""
        if rank not in range(len(self.ranks)):
            raise ScheduleError(
                f"rank is {rank}. The schedule has ranks 0 to {len(self.ranks) - 1}."
            )
        return memory_curve(self.timeline, rank, self.costs)

    @property
    def measured_peaks(self) -> tuple[float, ...]:
        """The most bytes that each rank was measured to hold; empty if memory was not measured."""
        return tuple(max(level.during for level in levels) for levels in self.measured)

    def measured_memory(self, rank: Rank) -> list[MemoryPoint]:
        """Return the measured memory of `rank` over time, in bytes, as `memory` does the planned.

        It is empty if memory was not measured.
        """
        if not self.measured:
            return []
        return measured_curve(self.timeline, rank, self.measured[rank])

    def actions(self) -> Iterator[TimedAction]:
        """Yield every action with its times, rank by rank."""
        timeline = self.timeline
        for rank, order in enumerate(timeline.schedule.orders):
            times = zip(order, timeline.starts[rank], timeline.ends[rank], strict=True)
            for action, start, end in times:
                yield TimedAction(rank, action, start, end)

    def __repr__(self) -> str:
        return (
            f"Report(makespan={self.makespan:g}, span={self.span:g}, "
            f"bubble_by_makespan={self.bubble_by_makespan:.4f}, "
            f"bubble_by_span={self.bubble_by_span:.4f}, peak_memory={self.peak_memory:g})"
        )

    def __str__(self) -> str:
        header = ["rank", "busy", "warm-up", "steady", "cool-down", "peak memory"]
        rows = [
            [str(number), *(f"{value:.5g}" for value in (rank.busy, *rank.idle, rank.peak_memory))]
            for number, rank in enumerate(self.ranks)
        ]
        if self.measured:
            header.append("measured bytes")
            for row, peak in zip(rows, self.measured_peaks, strict=True):
                row.append(f"{peak:.5g}")
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (header, *rows)
        ]
        return "\n".join(
            [
                f"makespan {self.makespan:.5g} (bubble {self.bubble_by_makespan:.2%}), "
                f"span {self.span:.5g} (bubble {self.bubble_by_span:.2%})",
                *table,
            ]
        )

    def _bubble(self, time: float) -> float:
        busy = sum(rank.busy for rank in self.ranks) / len(self.ranks)
        return _round_off(1 - busy / time, 1.0) if time > 0 else 0.0


def make_report(
    timeline: Timeline, costs: CostTable, measured: tuple[tuple[Held, ...], ...] = ()
) -> Report:
    """Return the report of a timeline, with the memory `measured` at its actions, if any."""
    makespan = max(map(max, timeline.ends))  # Collectives may end after what follows them.
    ranks = [_report_rank(timeline, rank, costs, makespan) for rank in range(len(timeline.ends))]
    return Report(timeline, costs, tuple(ranks), measured)


def _report_rank(timeline: Timeline, rank: Rank, costs: CostTable, makespan: float) -> RankReport:
    """Report one rank; only compute counts as busy, so waits and collectives are idle time."""
    order, starts, ends = _computes(timeline, rank)
    first_backward = next((n for n, a in enumerate(order) if _has_backward(a)), 0)
    last_forward = next(n for n in reversed(range(len(order))) if _has_forward(order[n]))
    # No action is in two phases, so a phase's idle time is its length minus its actions' time.
    cuts = [0, first_backward, max(first_backward, last_forward + 1), len(order)]
    busy = [fsum(map(sub, ends[a:b], starts[a:b])) for a, b in pairwise(cuts)]
    warm_up_end = starts[first_backward]
    times = [0.0, warm_up_end, max(warm_up_end, ends[last_forward]), makespan]
    lengths = [after - before for before, after in pairwise(times)]
    pairs = zip(lengths, busy, strict=True)
    return RankReport(
        first_start=starts[0] - _first_gathers(timeline, rank),
        last_end=max(timeline.ends[rank]),
        busy=sum(busy),
        idle=Idle(*(_round_off(length - part, makespan) for length, part in pairs)),
        peak_memory=peak_memory(timeline, rank, costs),
    )


def _round_off(idle: float, total: float) -> float:
    """Return idle time, or zero if it is within rounding."""
    return 0.0 if abs(idle) <= 1e-12 * total else idle


def _computes(
    timeline: Timeline, rank: Rank
) -> tuple[Sequence[Action], Sequence[float], Sequence[float]]:
    """Return the compute actions of `rank`, their starts and their ends."""
    order = timeline.schedule.orders[rank]
    starts, ends = timeline.starts[rank], timeline.ends[rank]
    schedule = timeline.schedule
    if not (schedule.has_comms or schedule.has_sharding):
        return order, starts, ends
    kept = [n for n, action in enumerate(order) if is_compute(action)]
    return [order[n] for n in kept], [starts[n] for n in kept], [ends[n] for n in kept]


def _first_gathers(timeline: Timeline, rank: Rank) -> float:
    """Return the time that a rank must begin before its first compute, to gather its stages.

    The rank may have gathered them earlier, while it waited for a message.
    """
    if not timeline.schedule.has_sharding:
        return 0.0
    order = timeline.schedule.orders[rank]
    first = next(place for place, action in enumerate(order) if is_compute(action))
    needed = gathered_stages(order[first])
    lengths = list(map(sub, timeline.ends[rank][:first], timeline.starts[rank][:first]))
    gathers = [
        place
        for place, action in enumerate(order[:first])
        if isinstance(action, Unshard) and action.stage in needed
    ]
    before = range(gathers[-1] + 1) if gathers else ()
    return fsum(lengths[n] for n in before if isinstance(order[n], SHARDING_TYPES))


def _has_forward(action: Action) -> bool:
    return any(isinstance(part, Forward) for part in compute_parts(action))


def _has_backward(action: Action) -> bool:
    return any(isinstance(part, BACKWARD_TYPES) for part in compute_parts(action))

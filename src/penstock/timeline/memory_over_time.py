"""Memory over time, planned or measured."""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from penstock.costs.footprint import Footprint
from penstock.ir import Rank
from penstock.ir.action import is_compute
from penstock.passes.held_memory import Held, changes_along, held_along, round_off
from penstock.timeline.timeline import Timeline


class MemoryPoint(NamedTuple):
    """The memory `held` by a rank from `time` on, until the next point."""

    time: float
    held: float


def memory_curve(timeline: Timeline, rank: Rank, footprint: Footprint) -> list[MemoryPoint]:
    """Return the memory of `rank` over time, with a point for each change."""
    return _changes(_levels(timeline, rank, footprint))


def measured_curve(timeline: Timeline, rank: Rank, measured: Sequence[Held]) -> list[MemoryPoint]:
    """Return what was measured at the actions of `rank` over time, with a point for each change."""
    order, starts, ends = timeline.schedule.orders[rank], timeline.starts[rank], timeline.ends[rank]
    levels: list[tuple[float, float]] = []
    for action, start, end, level in zip(order, starts, ends, measured, strict=True):
        if is_compute(action):  # Others run beside them.
            levels += [(start, level.during), (end, level.after)]
    return _changes(levels)


def _changes(levels: Iterable[tuple[float, float]]) -> list[MemoryPoint]:
    points = [MemoryPoint(0.0, 0.0)]
    for time, amount in levels:
        if amount != points[-1].held:
            points.append(MemoryPoint(time, amount))
    return points


def peak_memory(timeline: Timeline, rank: Rank, footprint: Footprint) -> float:
    """Return the most that `rank` holds at any time."""
    if timeline.schedule.has_sharding:
        return max(amount for _, amount in _levels(timeline, rank, footprint))
    return max(held.during for held in held_along(timeline.schedule, rank, footprint))


def _levels(timeline: Timeline, rank: Rank, footprint: Footprint) -> Iterator[tuple[float, float]]:
    """Yield the memory of `rank` after each start and end of an action, in time order."""
    schedule, starts, ends = timeline.schedule, timeline.starts[rank], timeline.ends[rank]
    if not schedule.has_sharding:
        along = held_along(schedule, rank, footprint)
        for start, end, level in zip(starts, ends, along, strict=True):
            yield start, level.during
            yield end, level.after
        return
    # A gather may start after computes that follow it in the order. At equal times, the order
    # decides.
    changes = []
    for start, end, change in zip(
        starts, ends, changes_along(schedule, rank, footprint), strict=True
    ):
        changes += [(start, change.rise), (end, change.net - change.rise)]
    held = 0.0
    for time, more in sorted(changes, key=itemgetter(0)):
        held = round_off(held + more, held)
        yield time, held

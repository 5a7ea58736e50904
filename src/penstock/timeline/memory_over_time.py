"""Activation memory over time."""

from typing import NamedTuple

from penstock.costs.footprint import Footprint
from penstock.ir import Rank
from penstock.passes.held_memory import held_along
from penstock.timeline.timeline import Timeline


class MemoryPoint(NamedTuple):
    """From `time` on a rank holds `held`, until the next point."""

    time: float
    held: float


def memory_curve(timeline: Timeline, rank: Rank, footprint: Footprint) -> list[MemoryPoint]:
    """The steps of what `rank` holds over time, without those that change nothing."""
    points = [MemoryPoint(0.0, 0.0)]
    along = held_along(timeline.schedule, rank, footprint)
    for start, end, held in zip(timeline.starts[rank], timeline.ends[rank], along, strict=True):
        for time, amount in ((start, held.during), (end, held.after)):
            if amount != points[-1].held:
                points.append(MemoryPoint(time, amount))
    return points


def peak_memory(timeline: Timeline, rank: Rank, footprint: Footprint) -> float:
    """The most that `rank` holds at any time."""
    return max(held.during for held in held_along(timeline.schedule, rank, footprint))

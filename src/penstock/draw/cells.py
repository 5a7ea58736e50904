"""The characters of a rank's lane in the terminal.

A character stands for a slice of time, and shows what the rank does in it. If a slice contains
several looks, each look gets characters in proportion to its time, as parties get seats. So short
bars and idle time neither vanish nor grow.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

from penstock.draw.panel import Bar, Kind, bars, collective_bars
from penstock.ir import Rank
from penstock.timeline import MemoryPoint, Report

# Without the full block, which would join the curves of two ranks.
_LEVELS = " ▁▂▃▄▅▆▇"
FULL = _LEVELS[-1]
_MOST = 0.6  # Share of the width that equal bars must fill; the rest may stay empty.
_ROUNDING = 1e-6  # A smaller part of a slice, or of a unit of time, counts as zero.

Look: TypeAlias = tuple[tuple[Kind, int], ...]
"""The kind and place of each bar, as `colour` takes them: two in an overlap, none if idle."""


class Column(NamedTuple):
    """A piece of a lane: one bar, the two bars of an overlap, or no bar if the rank is idle."""

    bars: tuple[Bar, ...]
    look: Look
    start: float
    end: float


class Stretch(NamedTuple):
    """The characters that show a slot."""

    slot: Column
    width: int
    exact_width: float
    """The width if characters could be divided."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The time that one character stands for, and the number of characters on the axis."""

    slice: float
    width: int

    def cell(self, time: float) -> int:
        """Return the position of the character at `time`."""
        return int(time / self.slice + _ROUNDING)


def fit_scale(lanes: Sequence[Sequence[Column]], width: int) -> Scale:
    """Return a scale that gives the longest lane at most `width` characters.

    If all times are multiples of a unit, the unit gets a whole number of characters, provided that
    the lanes then fill most of the width. Equal bars are then equally wide.
    """
    end = max((lane[-1].end for lane in lanes if lane), default=0.0)
    if end == 0:
        return Scale(1.0, width)
    unit = min(slot.end - slot.start for lane in lanes for slot in lane)
    num_units = end / unit
    whole = int(width / num_units + _ROUNDING)
    used = round(whole * num_units)
    if used >= _MOST * width and all(_is_whole(slot.end / unit) for lane in lanes for slot in lane):
        return Scale(unit / whole, used)
    return Scale(end / width, width)


def slots(report: Report, rank: Rank) -> list[Column]:
    """Return the lane of `rank` from 0 to the makespan, including idle time."""
    return _columns(bars(report, rank), report, rank)


def collective_slots(report: Report, rank: Rank) -> list[Column]:
    """Return the lane of the rank's gathers and reductions, including the time between them."""
    return _columns(collective_bars(report, rank), report, rank)


def _columns(drawn: Iterable[Bar], report: Report, rank: Rank) -> list[Column]:
    stages = report.timeline.schedule.placement.stages_of(rank)
    places = {stage: place for place, stage in enumerate(stages)}
    lane: list[Column] = []
    time = 0.0
    # A bar that takes no time is invisible. Only the halves of an overlap have the same times.
    seen = (bar for bar in drawn if bar.end > bar.start)
    for (start, end), together in groupby(seen, key=lambda bar: (bar.start, bar.end)):
        if start > time:
            lane.append(Column((), (), time, start))
        pair = tuple(together)
        look = tuple((bar.kind, places[bar.action.stage]) for bar in pair)
        lane.append(Column(pair, look, start, end))
        time = end
    if report.makespan > time:
        lane.append(Column((), (), time, report.makespan))
    return lane


def runs(lane: Sequence[Column], scale: Scale) -> list[Stretch]:
    """Return the lane in characters."""
    chosen: list[Column] = []
    credit: defaultdict[Look, float] = defaultdict(float)
    for parts in _slices(lane, scale):
        for slot, time in parts:
            credit[slot.look] += time / scale.slice
        # If several looks are equal, the first in time wins.
        look = max((slot.look for slot, _ in parts), key=credit.__getitem__)
        credit[look] -= 1
        chosen.append(max((part for part in parts if part[0].look == look), key=_time)[0])
    return [
        Stretch(slot, len(list(same)), (slot.end - slot.start) / scale.slice)
        for slot, same in groupby(chosen)
    ]


def memory_levels(points: Sequence[MemoryPoint], most: float, scale: Scale, end: float) -> str:
    """Return the most held in each slice of time, as blocks that are full at `most`."""
    held = [0.0] * _num_cells(end, scale)
    for point, until in zip(points, [*(p.time for p in points[1:]), end], strict=True):
        first = scale.cell(point.time)
        last = max(first, int(until / scale.slice - _ROUNDING))
        for cell in range(first, min(last + 1, len(held))):
            held[cell] = max(held[cell], point.held)
    return "".join(_LEVELS[_level(amount, most)] for amount in held)


def _level(amount: float, most: float) -> int:
    """Return the height of a block: at least 1 for any amount above 0, and full only at `most`."""
    if amount <= 0:
        return 0
    top = len(_LEVELS) - 1
    return max(1, min(top, int(top * amount / most + _ROUNDING)))


def _slices(lane: Sequence[Column], scale: Scale) -> list[list[tuple[Column, float]]]:
    """Return the columns in the slice of each character, with the time each has in it."""
    end = lane[-1].end if lane else 0.0
    cut: list[list[tuple[Column, float]]] = [[] for _ in range(_num_cells(end, scale))]
    for slot in lane:
        for cell in range(scale.cell(slot.start), len(cut)):
            until = (cell + 1) * scale.slice
            time = min(slot.end, until) - max(slot.start, cell * scale.slice)
            if time > _ROUNDING * scale.slice:
                cut[cell].append((slot, time))
            if slot.end <= until:
                break
    return [parts for parts in cut if parts]


def _num_cells(end: float, scale: Scale) -> int:
    return max(1, round(end / scale.slice))


def _time(part: tuple[Column, float]) -> float:
    return part[1]


def _is_whole(number: float) -> bool:
    return abs(number - round(number)) < _ROUNDING

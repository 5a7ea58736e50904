"""What each character of a rank's lane shows.

A character stands for a slice of time, and shows what the rank does in it. Where much happens in
one slice, each look gets as many characters as it has time, as seats are given to parties: what is
short neither vanishes nor grows, and idle time least of all.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

from penstock.draw.panel import Bar, Kind, bars
from penstock.ir import Rank
from penstock.timeline import MemoryPoint, Report

# Not up to the full block: the curves of two ranks would be one.
_LEVELS = " ▁▂▃▄▅▆▇"
FULL = _LEVELS[-1]
_MOST = 0.6  # Of the width, that equal bars may leave the rest empty.
_ROUNDING = 1e-6  # A smaller part of a slice, or of a unit of time, is none.

Look: TypeAlias = tuple[tuple[Kind, int], ...]
"""The kind and the place of each bar, as `colour` takes them: two in an overlap, none if idle."""


class Column(NamedTuple):
    """What a rank does for a while: one bar, the two of an overlap, or none if it is idle."""

    bars: tuple[Bar, ...]
    look: Look
    start: float
    end: float


class Stretch(NamedTuple):
    """The characters that show a slot."""

    slot: Column
    width: int
    exact_width: float
    """If characters could be cut."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much time a character stands for, and how many of them the axis has."""

    slice: float
    width: int

    def cell(self, time: float) -> int:
        """The character at `time`."""
        return int(time / self.slice + _ROUNDING)


def fit_scale(lanes: Sequence[Sequence[Column]], width: int) -> Scale:
    """Up to `width` characters for the longest of the lanes.

    Where all times are multiples of one, it gets a whole number of characters if they fill most of
    the width: equal bars are then equally wide.
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
    """The lane of `rank` from 0 to the makespan, idle time included."""
    stages = report.timeline.schedule.placement.stages_of(rank)
    places = {stage: place for place, stage in enumerate(stages)}
    lane: list[Column] = []
    time = 0.0
    # What takes no time cannot be seen. Only the halves of an overlap share their times.
    seen = (bar for bar in bars(report, rank) if bar.end > bar.start)
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
    """The lane in characters."""
    chosen: list[Column] = []
    credit: defaultdict[Look, float] = defaultdict(float)
    for parts in _slices(lane, scale):
        for slot, time in parts:
            credit[slot.look] += time / scale.slice
        # Of equals, the first in time.
        look = max((slot.look for slot, _ in parts), key=credit.__getitem__)
        credit[look] -= 1
        chosen.append(max((part for part in parts if part[0].look == look), key=_time)[0])
    return [
        Stretch(slot, len(list(same)), (slot.end - slot.start) / scale.slice)
        for slot, same in groupby(chosen)
    ]


def memory_levels(points: Sequence[MemoryPoint], most: float, scale: Scale, end: float) -> str:
    """The most that is held in each slice of time, as blocks that are full at `most`."""
    held = [0.0] * _num_cells(end, scale)
    for point, until in zip(points, [*(p.time for p in points[1:]), end], strict=True):
        first = scale.cell(point.time)
        last = max(first, int(until / scale.slice - _ROUNDING))
        for cell in range(first, min(last + 1, len(held))):
            held[cell] = max(held[cell], point.held)
    return "".join(_LEVELS[_level(amount, most)] for amount in held)


def _level(amount: float, most: float) -> int:
    """Any amount at all can be seen, and only the most of all fills the row."""
    if amount <= 0:
        return 0
    top = len(_LEVELS) - 1
    return max(1, min(top, int(top * amount / most + _ROUNDING)))


def _slices(lane: Sequence[Column], scale: Scale) -> list[list[tuple[Column, float]]]:
    """The slots in the slice of each character, and how much time they have in it."""
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

"""Characters are given out so that what a lane shows is true of the times."""

from collections import Counter
from itertools import pairwise

import pytest
from panels import overlap_panel, panel, unit_panel

from penstock.draw.cells import Scale, fit_scale, memory_levels, runs, slots
from penstock.draw.panel import Panel
from penstock.draw.time_axis import axis
from penstock.timeline import MemoryPoint

PANELS = [
    panel("1F1B"),
    panel("ZB-H1", 8, 100),
    panel("Interleaved1F1B", 4, 16),
    overlap_panel(4, 30),
    unit_panel(),
    panel("ForwardOnly", 1, 1),
]


@pytest.mark.parametrize("drawn", PANELS, ids=lambda one: one.title)
def test_slots_cover_the_whole_time(drawn: Panel) -> None:
    for rank in range(len(drawn.report.ranks)):
        lane = slots(drawn.report, rank)
        assert (0, drawn.report.makespan) == (lane[0].start, lane[-1].end)
        assert all(before.end == after.start for before, after in pairwise(lane))


@pytest.mark.parametrize("drawn", PANELS, ids=lambda one: one.title)
@pytest.mark.parametrize("width", [7, 83])
def test_each_look_has_as_many_characters_as_time(drawn: Panel, width: int) -> None:
    scale = Scale(drawn.report.makespan / width, width)
    for rank in range(len(drawn.report.ranks)):
        lane = slots(drawn.report, rank)
        shown: Counter[object] = Counter()
        exact: Counter[object] = Counter()
        for run in runs(lane, scale):
            shown[run.slot.look] += run.width
        for slot in lane:
            exact[slot.look] += (slot.end - slot.start) / scale.slice
        assert width == shown.total()
        assert all(abs(shown[look] - exact[look]) < 2 for look in exact)
        assert abs(shown[()] - exact[()]) < 1.5


@pytest.mark.parametrize("drawn", PANELS, ids=lambda one: one.title)
def test_bar_that_fills_a_character_is_where_it_belongs(drawn: Panel) -> None:
    scale = Scale(drawn.report.makespan / 300, 300)
    cell = 0
    for slot, width, _ in runs(slots(drawn.report, 0), scale):
        assert slot.start < (cell + 1) * scale.slice
        assert slot.end > (cell + width - 1) * scale.slice
        cell += width


def test_idle_time_spread_thinly_does_not_vanish() -> None:
    # After each forward the rank is idle for a fifth of a character: no majority anywhere.
    busy, number = slots(panel("1F1B", 1, 1).report, 0)[0], 100
    spread = []
    for n in range(number):
        spread.append(busy._replace(start=n, end=n + 0.8))
        spread.append(busy._replace(bars=(), look=(), start=n + 0.8, end=n + 1))
    shown: Counter[object] = Counter()
    for run in runs(spread, Scale(1.0, number)):
        shown[run.slot.look] += run.width
    assert {busy.look: 80, (): 20} == shown


def test_equal_times_get_equally_many_characters_if_they_fill_most_of_the_width() -> None:
    lanes = [slots(panel().report, rank) for rank in range(4)]
    assert Scale(0.5, 66) == fit_scale(lanes, 76)
    assert Scale(1.0, 33) == fit_scale(lanes, 55)
    assert Scale(33 / 65, 65) == fit_scale(lanes, 65)
    assert Scale(33 / 20, 20) == fit_scale(lanes, 20)


def test_unequal_times_fill_the_width() -> None:
    lanes = [slots(unit_panel().report, rank) for rank in range(4)]
    assert 76 == fit_scale(lanes, 76).width


def test_memory_shows_the_most_that_is_held_in_a_slice() -> None:
    points = [MemoryPoint(0, 0), MemoryPoint(1, 7), MemoryPoint(1.1, 3.5), MemoryPoint(3, 0.01)]
    assert " ▇▃▁" == memory_levels(points, 7, Scale(1.0, 4), 4.0)


def test_axis_is_as_wide_as_its_lanes() -> None:
    for drawn in (panel(), unit_panel()):
        for width in range(20, 60):
            line = axis(drawn, Scale(drawn.report.makespan / width, width))
            assert width == len(line)
            assert line.startswith("|0")


def test_axis_has_round_times() -> None:
    assert "|0        |5        |10       |15       " == axis(panel(), Scale(0.5, 40))
    assert "|0 s         |20 ms       |40 ms        " == axis(unit_panel(), Scale(0.0015, 40))

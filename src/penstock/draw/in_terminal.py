"""Timelines in the terminal: a lane of characters for each rank, in colour if possible."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group
from rich.style import Style
from rich.text import Text

from penstock.costs.units import MemoryUnit, TimeUnit
from penstock.draw.cells import (
    FULL,
    Column,
    Scale,
    collective_slots,
    fit_scale,
    memory_levels,
    runs,
    slots,
)
from penstock.draw.characters import BOTH, FAINT, IDLE, coloured, lettered, paint, split, thin
from penstock.draw.panel import Kind, Panel, has_collectives, memory_scale
from penstock.draw.time_axis import axis
from penstock.timeline import Report

_NARROWEST = 40
_ROOMY = 60
"""The least width at which there are figures to the right of the lanes."""
_BENEATH = "simulated"
_COLLECTIVES = "sharding"
_MEASURED = "measured"
_BOLD = Style(bold=True)
_MEMORY = Style(color="#8b93a1")
_ASCII = str.maketrans("·─µ▁▂▃▄▅▆▇", ".-u1234567")
"""Replacements for a terminal that has only ASCII characters."""


def print_panels(
    panels: Sequence[Panel], console: Console | None = None, *, memory: bool = True
) -> None:
    """Print the panels at the width of the terminal, in colour if it has colours."""
    console = console or Console()
    has_colour = console.color_system is not None and not console.no_color
    # Coloured lanes use half blocks, so they need a terminal that has them.
    is_ascii = console.options.ascii_only
    lines = _lines(panels, width=console.width, colour=has_colour and not is_ascii, memory=memory)
    if is_ascii:
        for line in lines:
            line.plain = line.plain.translate(_ASCII)
    console.print(Group(*lines))


def terminal(panels: Sequence[Panel], *, width: int, colour: bool, memory: bool = True) -> Group:
    """Return the panels one below the other, `width` characters wide, to be printed by rich.

    Panels in the same unit share the scale of time or memory.
    Without `memory`, the memory curves of the ranks are left out.
    """
    return Group(*_lines(panels, width=width, colour=colour, memory=memory))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A panel and the lanes of its ranks."""

    panel: Panel
    lanes: list[list[Column]]
    beneath: list[list[Column]]
    collectives: list[list[Column]]
    """The gathers and reductions of each rank; empty if there are none."""

    @property
    def all_lanes(self) -> list[list[Column]]:
        return self.lanes + self.beneath


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout that all panels share, so that they can be compared."""

    left: int
    """The number of characters before a lane."""
    lane: int
    peak: int
    """The number of characters for a rank's peak memory; 0 if there is no room for figures."""
    measured: int
    """The same for its measured peak; 0 if none was measured too."""
    scales: dict[TimeUnit, Scale]
    most: dict[MemoryUnit, float]
    colour: bool


def _lines(panels: Sequence[Panel], *, width: int, colour: bool, memory: bool) -> list[Text]:
    drawn = [
        _Drawn(
            panel,
            _lanes(panel.report),
            _lanes(panel.beneath) if panel.beneath else [],
            _collective_lanes(panel.report),
        )
        for panel in panels
    ]
    layout = _layout(drawn, max(width, _NARROWEST), colour=colour)
    lines: list[Text] = []
    for one in drawn:
        lines += _heading(one.panel)
        lines += _rank_lines(one, layout)
        if memory:
            lines += _memory_lines(one.panel, layout)
        lines.append(Text())
    lines += _beside_each_other(_legend(drawn, colour=colour), max(width, _NARROWEST))
    for line in lines:
        line.rstrip()
    return lines


def _lanes(report: Report) -> list[list[Column]]:
    return [slots(report, rank) for rank in range(len(report.ranks))]


def _collective_lanes(report: Report) -> list[list[Column]]:
    if not has_collectives(report):
        return []
    return [collective_slots(report, rank) for rank in range(len(report.ranks))]


def _layout(drawn: Sequence[_Drawn], width: int, *, colour: bool) -> _Layout:
    panels = [one.panel for one in drawn]
    labels = [f"rank {len(panel.report.ranks) - 1}" for panel in panels]
    labels += [_BENEATH for panel in panels if panel.beneath]
    labels += [_COLLECTIVES for one in drawn if one.collectives]
    labels += [_MEASURED for panel in panels if panel.report.measured]
    left = max(map(len, labels)) + 2
    peak, measured, right = 0, 0, 0
    if width >= _ROOMY:
        peaks = [p.memory(rank.peak_memory) for p in panels for rank in p.report.ranks]
        peak = max(map(len, ["peak", *peaks]))
        right = len("  bubble  ") + peak
        if found := [text for panel in panels for text in panel.measured_peaks]:
            measured = max(map(len, [_MEASURED, *found]))
            right += len("  ") + measured
    lane = width - left - right
    scales: dict[TimeUnit, Scale] = {}
    most: dict[MemoryUnit, float] = {}
    for panel in panels:
        same = [one for one in drawn if one.panel.time_unit == panel.time_unit]
        scales[panel.time_unit] = fit_scale([row for one in same for row in one.all_lanes], lane)
        most[panel.memory_unit] = memory_scale(
            [replace(p, caps=()) for p in panels], panel.memory_unit
        )
    return _Layout(left, lane, peak, measured, scales, most, colour)


def _heading(panel: Panel) -> Iterator[Text]:
    yield Text(panel.title, style=_BOLD)
    yield Text(panel.facts)
    if panel.beneath:
        yield Text(f"{_BENEATH}: {replace(panel, report=panel.beneath).facts}")


def _rank_lines(drawn: _Drawn, layout: _Layout) -> Iterator[Text]:
    """Yield the axis and a lane for each rank, with the lane to compare beneath it."""
    panel, report = drawn.panel, drawn.panel.report
    scale = layout.scales[panel.time_unit]
    yield _row("", Text(axis(panel, scale), FAINT), layout, ("bubble", "peak", _MEASURED))
    for rank, lane in enumerate(drawn.lanes):
        found = report.ranks[rank]
        num_stages = len(report.timeline.schedule.placement.stages_of(rank))
        shown = runs(lane, scale)
        text = coloured(shown, num_stages=num_stages) if layout.colour else lettered(shown)
        figures = (
            f"{report.bubble_of(rank):.1%}",
            panel.memory(found.peak_memory),
            panel.measured_peaks[rank] if report.measured else "",
        )
        yield _row(f"rank {rank}", text, layout, figures)
        if drawn.collectives:
            shown = runs(drawn.collectives[rank], scale)
            text = thin(shown, num_stages=num_stages) if layout.colour else lettered(shown)
            yield _row(_COLLECTIVES, text, layout)
        if drawn.beneath:
            shown = runs(drawn.beneath[rank], scale)
            text = thin(shown, num_stages=num_stages) if layout.colour else lettered(shown)
            yield _row(_BENEATH, text, layout)


def _memory_lines(panel: Panel, layout: _Layout) -> Iterator[Text]:
    """Yield the memory that each rank holds over time, and beneath it the measured one."""
    most = layout.most[panel.memory_unit]
    scale = layout.scales[panel.time_unit]
    yield _row("", Text(f"memory, {FULL} is {panel.memory(most)}", FAINT), layout)
    for rank in range(len(panel.report.ranks)):
        curves = {f"rank {rank}": panel.report.memory(rank)}
        if measured := panel.measured_memory(rank):
            curves[_MEASURED] = measured
        for name, points in curves.items():
            levels = memory_levels(points, most, scale, panel.report.makespan)
            yield _row(name, Text(levels, _MEMORY if layout.colour else ""), layout)


def _row(
    name: str, lane: Text, layout: _Layout, figures: tuple[str, str, str] | None = None
) -> Text:
    # If the console is narrower than the narrowest row, the row is cropped, not wrapped.
    row = Text(name.ljust(layout.left), no_wrap=True, overflow="crop")
    row.append_text(lane)
    if figures and layout.peak:
        row.pad_right(layout.left + layout.lane - len(row))
        row.append(f"  {figures[0]:>6}  {figures[1]:>{layout.peak}}")
        if layout.measured:
            row.append(f"  {figures[2]:>{layout.measured}}")
    return row


def _legend(drawn: Sequence[_Drawn], *, colour: bool) -> list[Text]:
    """Return the meaning of each colour or letter that occurs."""
    looks = {slot.look for one in drawn for lane in one.all_lanes for slot in lane}
    beside = {slot.look for one in drawn for lane in one.collectives for slot in lane}
    found = {bar for look in looks | beside for bar in look}
    entries = []
    for kind in Kind:
        if any(kind is bar_kind for bar_kind, _ in found):
            mark = (f" {kind.value} ", paint(kind)) if colour else kind.value
            entries.append(Text.assemble(mark, f" {kind.words}"))
    if any(len(look) > 1 for look in looks):
        halves = split(paint(Kind.FORWARD), paint(Kind.BACKWARD))
        entries.append(Text.assemble(("▀▀▀", halves) if colour else BOTH, " both at once"))
    if () in looks:
        entries.append(Text(f"{IDLE} idle"))
    if any(place for _, place in found):
        entries.append(Text(f"{'paler' if colour else 'lower case'}: a later stage of the rank"))
    return entries


def _beside_each_other(entries: Sequence[Text], width: int) -> list[Text]:
    """Return lines with as many entries as there is room for."""
    lines: list[Text] = []
    for entry in entries:
        if lines and len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines

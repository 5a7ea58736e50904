"""Draw timelines as a picture, SVG or PNG: one lane per rank, with its bubble and its memory."""

from collections.abc import Sequence
from os import PathLike
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from penstock.draw.colours import colour
from penstock.draw.panel import Kind, Panel, bars, check_panels, kinds, memory_scale
from penstock.draw.picture_lanes import (
    CAP_DASHES,
    MEASURED_WIDTH,
    draw_labels,
    draw_lanes,
    draw_memory,
    lanes,
    number_width,
)
from penstock.draw.picture_look import Page, new_figure, page, plain_style, save

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All in inches:
#
#   _LEFT        lanes         _BUBBLE  _GAP  _MEMORY  _PEAK  _MEASURED, if any is
#          legend
#          title
#          facts               bubble         memory    peak   measured
#   rank 0 [bars        ]        12.0%        [curve]   4
_LEFT, _BUBBLE, _GAP, _MEMORY, _PEAK, _MEASURED = 0.80, 0.52, 0.24, 1.3, 0.65, 0.75
_TOP, _LEGEND, _TITLE, _FACTS, _AXIS, _BETWEEN, _BOTTOM = 0.14, 0.28, 0.24, 0.24, 0.26, 0.16, 0.08
_LANES_LEAST, _LANES_MOST = 6.5, 16.0
_LANES_WITH_MEASURED = 7.4  # The least if the facts have one more.


class _Sheet(NamedTuple):
    """A picture being drawn, and the width of its lanes."""

    figure: "Figure"
    colours: Page
    width: float

    def add_axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """Add axes without a frame, in inches from the upper left corner."""
        total_width, total_height = self.figure.get_size_inches()
        bottom = total_height - top - height
        axes = self.figure.add_axes(
            (
                left / total_width,
                bottom / total_height,
                width / total_width,
                height / total_height,
            ),
            frameon=False,
        )
        axes.set_ylim(height, 0.0)
        axes.set_xticks([])
        axes.set_yticks([])
        return axes

    def write(
        self,
        text: str,
        x: float,
        baseline: float,
        *,
        is_title: bool = False,
        ends_at_x: bool = False,
    ) -> None:
        """Write a line of text, in inches from the upper left corner."""
        width, height = self.figure.get_size_inches()
        self.figure.text(
            x / width,
            1 - baseline / height,
            text,
            ha="right" if ends_at_x else "left",
            fontsize=11 if is_title else 8,
            fontweight="bold" if is_title else "normal",
            color=self.colours.ink if is_title else self.colours.faint_ink,
        )


def picture(
    panels: Sequence[Panel],
    path: str | PathLike[str],
    *,
    memory: bool = True,
    dark: bool = False,
) -> None:
    """Draw the panels one below the other, and write an SVG or a PNG, by the suffix of `path`.

    Panels in the same unit share the scale of time or memory.
    """
    save(draw_figure(panels, memory=memory, dark=dark), path)


@plain_style()
def draw_figure(panels: Sequence[Panel], *, memory: bool = True, dark: bool = False) -> "Figure":
    """Return the picture as a matplotlib figure."""
    check_panels(panels)
    limits = _time_limits(panels)
    width = _lanes_width(panels, limits)
    more = _MEASURED if any(panel.report.measured for panel in panels) else 0.0
    total = _LEFT + width + _BUBBLE + (_GAP + _MEMORY + _PEAK + more if memory else 0.12)
    shows_axis = [
        n + 1 == len(panels) or panels[n + 1].time_unit != panel.time_unit
        for n, panel in enumerate(panels)
    ]
    heights = [
        _TITLE + _FACTS + lanes(panel)[-1].bottom + (_AXIS if has_axis else 0.06) + _BETWEEN
        for panel, has_axis in zip(panels, shows_axis, strict=True)
    ]
    colours = page(dark=dark)
    figure = new_figure(total, _TOP + _LEGEND + sum(heights) - _BETWEEN + _BOTTOM, colours)
    sheet = _Sheet(figure, colours, width)
    _draw_legend(sheet, panels)
    top = _TOP + _LEGEND
    for panel, height, has_axis in zip(panels, heights, shows_axis, strict=True):
        axes = _draw_timeline(sheet, panel, top, limits[panel.time_unit])
        if has_axis:
            _draw_time_axis(axes, panel, colours)
        if memory:
            scale = memory_scale(panels, panel.memory_unit)
            _draw_memory_column(sheet, panel, top, limits[panel.time_unit], scale)
        top += height
    return figure


def _time_limits(panels: Sequence[Panel]) -> dict[str, float]:
    """Return the end of the time axis for each unit."""
    limits: dict[str, float] = {}
    for panel in panels:
        for report in (panel.report, panel.beneath or panel.report):
            limits[panel.time_unit] = max(limits.get(panel.time_unit, 0.0), report.makespan)
    return {unit: limit or 1.0 for unit, limit in limits.items()}


def _lanes_width(panels: Sequence[Panel], limits: dict[str, float]) -> float:
    """Return a width, within limits, that has room for the numbers in most bars."""
    has_measured = any(panel.report.measured for panel in panels)
    width = _LANES_WITH_MEASURED if has_measured else _LANES_LEAST
    for panel in panels:
        drawn = [bar for rank in range(len(panel.report.ranks)) for bar in bars(panel.report, rank)]
        usual = median(bar.end - bar.start for bar in drawn)
        if usual > 0:
            number = max(bar.number for bar in drawn)
            width = max(width, number_width(number) * limits[panel.time_unit] / usual)
    return min(width, _LANES_MOST)


def _draw_timeline(sheet: _Sheet, panel: Panel, top: float, limit: float) -> "Axes":
    """Draw the title, facts, lanes and bubbles."""
    drawn = lanes(panel)
    right = _LEFT + sheet.width + _BUBBLE
    sheet.write(panel.title, _LEFT, top + 0.17, is_title=True)
    headline = top + _TITLE + 0.14
    sheet.write(panel.facts, _LEFT, headline)
    sheet.write("bubble", right, headline, ends_at_x=True)
    axes = sheet.add_axes(_LEFT, top + _TITLE + _FACTS, sheet.width, drawn[-1].bottom)
    axes.set_xlim(0.0, limit)
    axes.set_label(panel.title)
    draw_lanes(axes, drawn, sheet.colours, width=sheet.width)
    draw_labels(axes, drawn, sheet.colours, right=right)
    return axes


def _draw_memory_column(
    sheet: _Sheet, panel: Panel, top: float, limit: float, scale: float
) -> None:
    left = _LEFT + sheet.width + _BUBBLE + _GAP
    headline = top + _TITLE + 0.14
    sheet.write("memory", left, headline)
    sheet.write("peak", left + _MEMORY + 0.08, headline)
    if panel.report.measured:
        sheet.write("measured", left + _MEMORY + 0.08 + _PEAK, headline)
    axes = sheet.add_axes(left, top + _TITLE + _FACTS, _MEMORY, lanes(panel)[-1].bottom)
    axes.set_xlim(0.0, limit)
    axes.set_label(f"{panel.title}: memory")
    draw_memory(axes, panel, sheet.colours, scale=scale, peak_width=_PEAK)


def _draw_time_axis(axes: "Axes", panel: Panel, colours: Page) -> None:
    """Draw ticks under the lanes; seconds are shown in the unit that keeps numbers short."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    limit = axes.get_xlim()[1]
    factor, unit = 1.0, ""
    if panel.time_unit == "s":
        scales = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
        factor, unit = next((s for s in scales if limit * s[0] >= 1), scales[-1])
    locator = MaxNLocator(nbins=10, steps=[1, 2, 5, 10])
    ticks = [tick for tick in locator.tick_values(0.0, limit * factor) if tick <= limit * factor]
    axes.set_xticks([tick / factor for tick in ticks])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time * factor:.5g}"))
    axes.tick_params(
        axis="x", color=colours.rule, labelcolor=colours.faint_ink, labelsize=7.5, length=3, pad=2
    )
    axes.annotate(
        f"time, {unit}" if unit else "time",
        (0.0, 0.0),
        xycoords="axes fraction",
        xytext=(-6, -5),
        textcoords="offset points",
        ha="right",
        va="top",
        color=colours.faint_ink,
        fontsize=7.5,
    )


def _draw_legend(sheet: _Sheet, panels: Sequence[Panel]) -> None:
    """Draw one legend for all panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found = {kind for panel in panels for kind in kinds(panel.report)}
    entries = [(kind.words, colour(kind)) for kind in Kind if kind in found]
    placements = [panel.report.timeline.schedule.placement for panel in panels]
    most = max(len(p.stages_of(rank)) for p in placements for rank in range(p.num_ranks))
    if most > 1:
        entries.append(("paler: later stages of the rank", colour(Kind.FORWARD, most - 1, most)))
    entries.append(("idle", sheet.colours.idle))
    handles: list[Artist] = [Patch(facecolor=fill, label=words) for words, fill in entries]
    scales = {panel.memory_unit: memory_scale(panels, panel.memory_unit) for panel in panels}
    if any(cap <= scales[panel.memory_unit] for panel in panels for cap in panel.caps):
        line = Line2D([], [], color=sheet.colours.ink, linestyle=CAP_DASHES, linewidth=0.7)
        line.set_label("cap of the memory")
        handles.append(line)
    if any(panel.measured_memory(0) for panel in panels):
        line = Line2D([], [], color=sheet.colours.ink, linewidth=MEASURED_WIDTH)
        line.set_label("measured memory")
        handles.append(line)
    width, height = sheet.figure.get_size_inches()
    sheet.figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(_LEFT / width, 1 - _TOP / height),
        ncols=len(handles),
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.0,
        handleheight=1.0,
        handletextpad=0.5,
        columnspacing=1.4,
        fontsize=8,
        labelcolor=sheet.colours.ink,
    )

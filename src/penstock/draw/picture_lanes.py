"""One panel in a picture: the lanes of its ranks, and the memory beside them.

Heights are in inches from the top of the panel, to know what fits into a bar.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.draw.colours import TEXT, colour
from penstock.draw.panel import Bar, Panel, bars, collective_bars, has_collectives
from penstock.draw.picture_look import Page
from penstock.ir import Rank
from penstock.timeline import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUMBER_SIZE = 7.5
"""The font size of the microbatch numbers, in points."""
CAP_DASHES = (0.0, (3.0, 2.0))
MEASURED_WIDTH = 0.9
_POINTS = 72.0  # Per inch.
_DIGIT = 0.64  # Width of a digit in this font, as a share of the font size.
_MARGIN = 0.3  # Space around a number, as a share of the font size.
_SMALL = 7.5
_THIN = 0.4  # Height of a lane of collectives, as a share of a rank's lane.


class Lane(NamedTuple):
    """The lane of a rank in the panel's report, or a lower one beneath it.

    That is the lane of the rank's gathers and reductions, or its lane in the other report.
    """

    report: Report
    rank: Rank
    top: float
    height: float
    is_beneath: bool
    has_collectives: bool = False

    @property
    def middle(self) -> float:
        return self.top + self.height / 2

    @property
    def bottom(self) -> float:
        return self.top + self.height


def lanes(panel: Panel) -> list[Lane]:
    """Return the lanes from the top down. With many ranks, lanes are less high."""
    num_ranks = len(panel.report.ranks)
    height, gap = (0.30, 0.06) if num_ranks <= 8 else (0.21, 0.04)
    is_sharded = has_collectives(panel.report)
    found, top = [], 0.0
    for rank in range(num_ranks):
        found.append(Lane(panel.report, rank, top, height, False))
        top += height + gap
        if is_sharded:
            thin = height * _THIN
            found.append(Lane(panel.report, rank, top - gap / 2, thin, True, True))
            top += thin + gap / 2
        if panel.beneath is not None:
            found.append(Lane(panel.beneath, rank, top - gap / 2, height / 2, True))
            top += height / 2 + gap
    return found


def number_width(number: int) -> float:
    """Return the width, in inches, that a microbatch's number needs within a bar."""
    return (len(str(number)) * _DIGIT + _MARGIN) * NUMBER_SIZE / _POINTS


def draw_lanes(axes: "Axes", drawn: Sequence[Lane], colours: Page, *, width: float) -> None:
    """Draw the bars over the idle time of each lane; the axes are `width` inches wide."""
    from matplotlib.collections import PolyCollection

    idle = [_box(0.0, lane.report.makespan, lane.top, lane.bottom) for lane in drawn]
    axes.add_collection(
        PolyCollection(idle, facecolors=colours.idle, linewidths=0, gid="idle"), autolim=False
    )
    inch = width / axes.get_xlim()[1]  # Per unit of time.
    boxes, fills, edges = [], [], []
    for lane in drawn:
        for bar, fill in _coloured(lane):
            top, height = _extent(bar, lane)
            boxes.append(_box(bar.start, bar.end, top, top + height))
            fills.append(fill)
            length = (bar.end - bar.start) * inch
            edges.append(min(0.8, 0.1 * length * _POINTS))  # Narrow bars keep their colour.
            if not lane.has_collectives and _has_room(bar.number, length, height):
                _write_number(axes, bar, top + height / 2)
    axes.add_collection(
        PolyCollection(
            boxes, facecolors=fills, edgecolors=colours.paper, linewidths=edges, gid="bars"
        ),
        autolim=False,
    )


def draw_labels(axes: "Axes", drawn: Sequence[Lane], colours: Page, *, right: float) -> None:
    """Write the lanes' names before time 0, and their bubbles, aligned at `right` inches."""
    from matplotlib.transforms import blended_transform_factory

    assert axes.figure is not None
    across = blended_transform_factory(axes.figure.dpi_scale_trans, axes.transData)
    for lane in drawn:
        ink = colours.faint_ink if lane.is_beneath else colours.ink
        size = _SMALL - 1 if lane.is_beneath else _SMALL
        name = f"rank {lane.rank}"
        if lane.is_beneath:
            name = "sharding" if lane.has_collectives else "simulated"
        axes.annotate(
            name,
            (0.0, lane.middle),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center_baseline",
            color=ink,
            fontsize=size,
        )
        if lane.has_collectives:
            continue
        axes.text(
            right,
            lane.middle,
            f"{lane.report.bubble_of(lane.rank):.1%}",
            transform=across,
            ha="right",
            va="center_baseline",
            color=ink,
            fontsize=size,
        )


def draw_memory(
    axes: "Axes", panel: Panel, colours: Page, *, scale: float, peak_width: float
) -> None:
    """Draw what each rank holds over time, beside its lane; `scale` fills a lane's height.

    Measured memory is a line over the planned. Peaks are beside it, in columns of `peak_width`.
    """
    end = panel.report.makespan
    for lane in lanes(panel):
        if lane.is_beneath:
            continue
        axes.hlines(lane.bottom, 0.0, end, colors=colours.rule, linewidths=0.8, clip_on=False)
        points = panel.report.memory(lane.rank)
        axes.stairs(
            [lane.bottom - point.held / scale * lane.height for point in points],
            [*(point.time for point in points), max(end, points[-1].time)],
            baseline=lane.bottom,
            fill=True,
            color=colours.memory,
            linewidth=0,
        )
        if panel.caps and panel.caps[lane.rank] <= scale:
            level = lane.bottom - panel.caps[lane.rank] / scale * lane.height
            axes.hlines(
                level,
                0.0,
                end,
                colors=colours.ink,
                linewidths=0.7,
                linestyles=CAP_DASHES,
                gid="cap",
            )
        if curve := panel.measured_memory(lane.rank):
            edges = [*(point.time for point in curve), max(end, curve[-1].time)]
            # An amount held for no time would be a speck.
            lasting = [n for n in range(len(curve)) if edges[n] < edges[n + 1]]
            axes.stairs(
                [lane.bottom - curve[n].held / scale * lane.height for n in lasting],
                [*(edges[n] for n in lasting), edges[-1]],
                baseline=None,
                color=colours.ink,
                linewidth=MEASURED_WIDTH,
                gid="measured",
            )
        peaks = [panel.memory(panel.report.ranks[lane.rank].peak_memory)]
        if panel.report.measured:
            peaks.append(panel.measured_peaks[lane.rank])
        for place, peak in enumerate(peaks):
            axes.annotate(
                peak,
                (1.0, lane.middle),
                xycoords=("axes fraction", "data"),
                xytext=(6 + place * peak_width * _POINTS, 0),
                textcoords="offset points",
                va="center_baseline",
                color=colours.ink,
                fontsize=_SMALL,
            )


def _coloured(lane: Lane) -> Iterator[tuple[Bar, str]]:
    """Yield the bars of the lane, each with its colour."""
    own = lane.report.timeline.schedule.placement.stages_of(lane.rank)
    drawn = collective_bars if lane.has_collectives else bars
    for bar in drawn(lane.report, lane.rank):
        yield bar, colour(bar.kind, own.index(bar.action.stage), len(own))


def _box(start: float, end: float, top: float, bottom: float) -> list[tuple[float, float]]:
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _extent(bar: Bar, lane: Lane) -> tuple[float, float]:
    """Return the top and the height of a bar."""
    if bar.half == "whole":
        return lane.top, lane.height
    half = lane.height / 2
    return (lane.top if bar.half == "upper" else lane.top + half), half


def _has_room(number: int, length: float, height: float) -> bool:
    return length >= number_width(number) and height * _POINTS >= NUMBER_SIZE


def _write_number(axes: "Axes", bar: Bar, middle: float) -> None:
    axes.text(
        (bar.start + bar.end) / 2,
        middle,
        str(bar.number),
        ha="center",
        va="center_baseline",
        color=TEXT,
        fontsize=NUMBER_SIZE,
    )

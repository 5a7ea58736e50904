"""A page for the browser: one file that contains everything and needs no network.

Python writes the page's content as JSON (`page_data`); the scripts in `page_parts` draw it.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import TypedDict

from penstock.costs.units import MemoryUnit, TimeUnit, in_memory
from penstock.draw.colours import TEXT, colour
from penstock.draw.panel import (
    Bar,
    Kind,
    Panel,
    bars,
    check_panels,
    collective_bars,
    has_collectives,
    kinds,
    memory_scale,
)
from penstock.ir import Schedule
from penstock.timeline import MemoryPoint, Report

_SCRIPTS = ("words.js", "lanes.js", "page.js")


class LaneData(TypedDict):
    """The bars of a rank in time order, one column per property; each letter is one bar."""

    kinds: str
    halves: str
    """Letters: w for a whole bar, u and l for the upper and lower half of an overlap."""
    stages: list[int]
    microbatches: list[int]
    """Empty for gathers and reductions."""
    starts: list[float]
    ends: list[float]


class TimelineData(TypedDict):
    """The lanes of all ranks, and the colour of each kind by stage."""

    makespan: float
    colours: dict[str, list[str]]
    lanes: list[LaneData]
    collectives: list[LaneData]
    """The gathers and reductions of each rank; empty if there are none."""


class MemoryData(TypedDict):
    """The memory that a rank holds from each time until the next."""

    times: list[float]
    held: list[float]


class FactData(TypedDict):
    """A number in words, with a note to show beside it."""

    name: str
    value: str
    note: str


class TableData(TypedDict):
    """The time and memory of each rank, in words."""

    header: list[str]
    rows: list[list[str]]


class PanelData(TypedDict):
    """A panel; `beneath` has at most one timeline."""

    title: str
    time_unit: TimeUnit
    memory_unit: MemoryUnit
    summary: str
    facts: list[FactData]
    bubbles: list[str]
    peaks: list[str]
    peak_memory: float
    caps: list[float]
    """The most each rank may hold; empty if there is no cap."""
    memory_scale: float
    """The amount that fills the height of a memory curve."""
    table: TableData
    timeline: TimelineData
    beneath: list[TimelineData]
    memory: list[MemoryData]
    measured: list[MemoryData]
    """The measured memory of each rank, in the unit of `memory`; empty if there is none."""
    measured_peaks: list[str]


class KindData(TypedDict):
    """A kind for the legend, with its colours from a rank's first stage to its last."""

    letter: str
    words: str
    colours: list[str]


class PageData(TypedDict):
    """Everything that the scripts need to draw."""

    text_colour: str
    kinds: list[KindData]
    panels: list[PanelData]


def page(panels: Sequence[Panel], *, title: str = "Penstock") -> str:
    """Return the panels as an HTML page, to be saved as one file.

    >>> from penstock import schedules
    >>> from penstock.sim import simulate
    >>> schedule = schedules.get("1F1B")(num_ranks=4, num_microbatches=8)
    >>> page([Panel("1F1B", simulate(schedule))])[:15]
    '<!doctype html>'
    """
    # In a script element, only "<" can end the text or change how it is read.
    data = json.dumps(page_data(panels), allow_nan=False, separators=(",", ":"))
    return Template(_part("page.html")).substitute(
        title=escape(title),
        style=page_style(),
        facts=_facts_table(panels),
        data=data.replace("<", "\\u003c"),
        script=page_script(),
    )


def page_style() -> str:
    """Return the style sheet, for use in another page."""
    return _part("page.css")


def page_script() -> str:
    """Return the script of `connectTheme` and of `Timeline`, which shows `page_data`."""
    return "\n".join(map(_part, _SCRIPTS))


def page_data(panels: Sequence[Panel]) -> PageData:
    """Return the page's content: exact times, and numbers in the same words as in every drawing."""
    check_panels(panels)
    found = {kind for panel in panels for report in _reports(panel) for kind in kinds(report)}
    schedules = [report.timeline.schedule for panel in panels for report in _reports(panel)]
    most = max(len(stages) for schedule in schedules for stages in _stages_by_rank(schedule))
    legend: list[KindData] = [
        {
            "letter": kind.value,
            "words": kind.words,
            "colours": [colour(kind, place, most) for place in range(most)],
        }
        for kind in Kind
        if kind in found
    ]
    return {
        "text_colour": TEXT,
        "kinds": legend,
        "panels": [_panel(panel, panels) for panel in panels],
    }


def _reports(panel: Panel) -> list[Report]:
    return [panel.report] if panel.beneath is None else [panel.report, panel.beneath]


def _panel(panel: Panel, panels: Sequence[Panel]) -> PanelData:
    report = panel.report
    timeline, *beneath = map(_timeline, _reports(panel))
    ranks = range(len(report.ranks))
    measured = [curve for rank in ranks if (curve := panel.measured_memory(rank))]
    return {
        "title": panel.title,
        "time_unit": panel.time_unit,
        "memory_unit": panel.memory_unit,
        "summary": panel.facts,
        "facts": _facts(panel),
        "bubbles": _bubbles(report),
        "peaks": [panel.memory(rank.peak_memory) for rank in report.ranks],
        "peak_memory": report.peak_memory,
        "caps": list(panel.caps),
        "memory_scale": memory_scale(panels, panel.memory_unit),
        "table": _table(panel),
        "timeline": timeline,
        "beneath": beneath,
        "memory": [_curve(report.memory(rank)) for rank in ranks],
        "measured": list(map(_curve, measured)),
        "measured_peaks": panel.measured_peaks,
    }


def _curve(points: list[MemoryPoint]) -> MemoryData:
    return {"times": [point.time for point in points], "held": [point.held for point in points]}


def _facts(panel: Panel) -> list[FactData]:
    report = panel.report
    facts = [
        ("makespan", panel.time(report.makespan), f"bubble {report.bubble_by_makespan:.1%}"),
        ("span", panel.time(report.span), f"bubble {report.bubble_by_span:.1%}"),
        ("peak memory", panel.memory(report.peak_memory), ""),
    ]
    if report.measured:
        facts.append(("measured peak", in_memory(max(report.measured_peaks), "bytes"), ""))
    if panel.beneath is not None:
        beneath = panel.beneath
        note = f"bubble {beneath.bubble_by_makespan:.1%}"
        facts.append(("simulated makespan", panel.time(beneath.makespan), note))
    return [{"name": name, "value": value, "note": note} for name, value, note in facts]


def _bubbles(report: Report) -> list[str]:
    return [f"{report.bubble_of(rank):.1%}" for rank in range(len(report.ranks))]


def _table(panel: Panel) -> TableData:
    names = ["rank", "busy", "warm-up", "steady", "cool-down", "bubble", "peak memory"]
    bubbles = _bubbles(panel.report)
    rows = [
        [
            str(number),
            *(panel.time(value) for value in (rank.busy, *rank.idle)),
            bubbles[number],
            panel.memory(rank.peak_memory),
        ]
        for number, rank in enumerate(panel.report.ranks)
    ]
    if panel.report.measured:
        names.append("measured peak")
        rows = [[*row, peak] for row, peak in zip(rows, panel.measured_peaks, strict=True)]
    return {"header": names, "rows": rows}


def _timeline(report: Report) -> TimelineData:
    schedule = report.timeline.schedule
    return {
        "makespan": report.makespan,
        "colours": {kind.value: _colours_by_stage(schedule, kind) for kind in kinds(report)},
        "lanes": [_lane(list(bars(report, rank))) for rank in range(schedule.num_ranks)],
        "collectives": [
            {**_lane(list(collective_bars(report, rank))), "microbatches": []}
            for rank in range(schedule.num_ranks if has_collectives(report) else 0)
        ],
    }


def _lane(lane: list[Bar]) -> LaneData:
    return {
        "kinds": "".join(bar.kind.value for bar in lane),
        "halves": "".join(bar.half[0] for bar in lane),
        "stages": [bar.action.stage for bar in lane],
        "microbatches": [bar.number for bar in lane],
        "starts": [bar.start for bar in lane],
        "ends": [bar.end for bar in lane],
    }


def _stages_by_rank(schedule: Schedule) -> list[tuple[int, ...]]:
    return [schedule.placement.stages_of(rank) for rank in range(schedule.num_ranks)]


def _colours_by_stage(schedule: Schedule, kind: Kind) -> list[str]:
    by_stage = {
        stage: colour(kind, place, len(stages))
        for stages in _stages_by_rank(schedule)
        for place, stage in enumerate(stages)
    }
    return [by_stage[stage] for stage in range(schedule.num_stages)]


def _facts_table(panels: Sequence[Panel]) -> str:
    """Return a table for browsers that do not run scripts."""
    rows = (
        f"<tr><th scope=row>{escape(panel.title)}</th><td>{escape(panel.facts)}</td></tr>"
        for panel in panels
    )
    return "<table>" + "".join(rows) + "</table>"


def _part(name: str) -> str:
    return (files("penstock.draw") / "page_parts" / name).read_text(encoding="utf-8")

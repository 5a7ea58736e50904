"""Gathers and reductions are drawn on lanes of their own, and only where there are some."""

import io
import json
from typing import Any

import pytest
from matplotlib.collections import PolyCollection
from panels import gathered_panel, panel
from rich.console import Console

from penstock.draw.in_terminal import terminal
from penstock.draw.panel import Kind, Panel, bars, collective_bars, has_collectives
from penstock.draw.perfetto import trace
from penstock.draw.picture_file import draw_figure
from penstock.draw.web_page import page_data
from penstock.ir import ReduceGrads, Unshard

DRAWN = gathered_panel()
NONE = [panel("ZB-V"), gathered_panel(gather=0.0)]
without_collectives = pytest.mark.parametrize("drawn", NONE, ids=["not sharded", "no time"])


def lines(drawn: Panel, *, colour: bool = False) -> list[str]:
    console = Console(width=120, color_system=None, file=io.StringIO())
    console.print(terminal([drawn], width=120, colour=colour, memory=False))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_bars_are_the_gathers_and_reductions_of_a_rank() -> None:
    found = list(collective_bars(DRAWN.report, 0))
    assert (Unshard(0), Kind.GATHER, 0.0, 0.5, "whole") == found[0]
    assert (ReduceGrads(0), Kind.REDUCE) == found[-1][:2]
    assert DRAWN.report.makespan == max(bar.end for r in (0, 1) for bar in lane(r))
    assert 0 == found[0].number
    assert {Kind.GATHER, Kind.REDUCE}.isdisjoint(bar.kind for bar in bars(DRAWN.report, 0))


def lane(rank: int) -> list[Any]:
    return list(collective_bars(DRAWN.report, rank))


@without_collectives
def test_nothing_is_added_where_there_are_none(drawn: Panel) -> None:
    assert not has_collectives(drawn.report)
    assert not any("sharding" in line for line in lines(drawn))
    assert "gather" not in " ".join(lines(drawn)[-2:])
    assert "sharding" not in trace([drawn])
    assert [] == page_data([drawn])["panels"][0]["timeline"]["collectives"]


@pytest.mark.parametrize("colour", [False, True])
def test_terminal_has_a_row_below_each_rank(colour: bool) -> None:
    found = lines(DRAWN, colour=colour)
    rows = [line.split()[0] for line in found if line.startswith(("rank ", "sharding"))]
    assert ["rank", "sharding"] * 2 == rows
    legend = " ".join(found[-2:])
    assert "gather" in legend
    assert "reduction" in legend


def test_letters_name_the_kind_and_the_stage() -> None:
    below = next(line for line in lines(DRAWN) if line.startswith("sharding"))
    assert "G0" in below
    assert "g3" in below  # A later stage of the rank.
    assert "S0" in below


def test_picture_has_a_thin_lane_below_each_rank() -> None:
    axes = draw_figure([DRAWN]).axes[0]
    assert ["rank 0", "sharding", "rank 1", "sharding"] == [
        text.get_text() for text in axes.texts if text.get_text().startswith(("rank", "sharding"))
    ]
    (found,) = (
        artist
        for artist in axes.collections
        if isinstance(artist, PolyCollection) and artist.get_gid() == "idle"
    )
    heights = [path.get_extents().height for path in found.get_paths()]
    assert heights[0] == pytest.approx(heights[1] / 0.4)
    (legend,) = draw_figure([DRAWN]).legends
    assert {"gather", "reduction"} <= {text.get_text() for text in legend.get_texts()}


def test_page_has_the_collectives_of_each_rank() -> None:
    data = page_data([DRAWN])
    timeline = data["panels"][0]["timeline"]
    for rank, found in enumerate(timeline["collectives"]):
        assert [bar.start for bar in lane(rank)] == found["starts"]
        assert [bar.action.stage for bar in lane(rank)] == found["stages"]
        assert "".join(bar.kind.value for bar in lane(rank)) == found["kinds"]
        assert [] == found["microbatches"]
    assert {"G", "S"} <= {kind["letter"] for kind in data["kinds"]}
    assert {"G", "S"} <= timeline["colours"].keys()


def test_trace_has_a_thread_of_collectives_after_each_rank() -> None:
    events = json.loads(trace([DRAWN]))["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    places = {
        names[event["tid"]]: event["args"]["sort_index"]
        for event in events
        if event["name"] == "thread_sort_index"
    }
    assert ["rank 0", "rank 0: sharding", "rank 1", "rank 1: sharding"] == sorted(
        places, key=places.__getitem__
    )
    gathers = [
        event
        for event in events
        if event["ph"] == "X" and names[event["tid"]] == "rank 1: sharding"
    ]
    assert [bar.start * 1e3 for bar in lane(1)] == [event["ts"] for event in gathers]
    assert "gather 1" == gathers[0]["name"]
    assert {"stage", "kind", "start", "end"} == gathers[0]["args"].keys()

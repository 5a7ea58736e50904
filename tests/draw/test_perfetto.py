"""The trace says what the timeline says, in the form that its viewers read."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from panels import (
    beneath_panel,
    memory_panel,
    overlap_panel,
    panel,
    recomputed_panel,
    unit_panel,
)

from penstock.draw.panel import Panel, bars
from penstock.draw.perfetto import trace
from penstock.timeline import Report

PANELS = [panel("1F1B"), panel("ZB-V"), overlap_panel(), unit_panel(), recomputed_panel()]


def events(*panels: Panel, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace(panels))["traceEvents"] if phase == event["ph"]]


def names(*panels: Panel, kind: str) -> dict[int, str]:
    """What the processes or threads are called, by their number."""
    number = "pid" if kind == "process" else "tid"
    return {
        event[number]: event["args"]["name"]
        for event in events(*panels, phase="M")
        if event["name"] == f"{kind}_name"
    }


@pytest.mark.parametrize("drawn", PANELS, ids=lambda one: one.title)
def test_bars_reproduce_the_timeline(drawn: Panel) -> None:
    factor = 1e6 if drawn.time_unit == "s" else 1e3
    ranks = names(drawn, kind="thread")
    found = [
        (
            ranks[event["tid"]],
            event["name"],
            event["args"]["stage"],
            event["args"]["microbatch"],
            event["args"]["kind"],
            event["args"]["start"],
            event["args"]["end"],
            event["ts"],
            pytest.approx(event["ts"] + event["dur"]),
        )
        for event in events(drawn, phase="X")
    ]
    expected = [
        (
            f"rank {rank}",
            f"{bar.kind.value}{bar.action.mb}",
            bar.action.stage,
            bar.action.mb,
            bar.kind.words,
            bar.start,
            bar.end,
            bar.start * factor,
            bar.end * factor,
        )
        for rank in range(4)
        for bar in bars(drawn.report, rank)
    ]
    assert expected == found


def test_each_panel_is_a_process_and_what_is_beneath_another() -> None:
    drawn = [panel("1F1B"), beneath_panel("1F1B")]
    expected = ["1F1B", "1F1B, measured", "1F1B, measured: simulated"]
    assert expected == list(names(*drawn, kind="process").values())
    spans: Counter[int] = Counter()
    for event in events(*drawn, phase="X"):
        spans[event["pid"]] = max(spans[event["pid"]], round(event["ts"] + event["dur"]))
    assert [33_000, 394_400, 330_000] == list(spans.values())


def test_ranks_are_in_order_and_no_thread_has_the_number_of_a_process() -> None:
    drawn = [panel("1F1B"), panel("GPipe")]
    threads = names(*drawn, kind="thread")
    assert [f"rank {rank}" for rank in range(4)] * 2 == list(threads.values())
    assert not threads.keys() & names(*drawn, kind="process").keys()
    order = [
        e["args"]["sort_index"] for e in events(*drawn, phase="M") if "thread_sort" in e["name"]
    ]
    assert [0, 1, 2, 3] * 2 == order


@pytest.mark.parametrize("drawn", [panel("ZB-V"), unit_panel()], ids=lambda one: one.title)
def test_counters_reproduce_the_memory(drawn: Panel) -> None:
    factor, unit = (1e6, " (bytes)") if drawn.time_unit == "s" else (1e3, "")
    expected = [
        (f"memory of rank {rank}{unit}", point.time * factor, point.held)
        for rank in range(4)
        for point in drawn.report.memory(rank)
    ]
    found = [(e["name"], e["ts"], e["args"]["held"]) for e in events(drawn, phase="C")]
    assert expected == found


@pytest.mark.parametrize("drawn", PANELS, ids=lambda one: one.title)
def test_arrows_join_the_bars_of_neighbouring_stages(drawn: Panel) -> None:
    ends = {event["id"]: event for event in events(drawn, phase="f")}
    starts = events(drawn, phase="s")
    assert len(starts) == len(ends) == _num_messages(drawn.report)
    inside = events(drawn, phase="X")
    for start in starts[:: max(1, len(starts) // 30)]:
        step = 1 if start["name"] == "activation" else -1
        pairs = [
            (a["args"]["stage"] + step, a["args"]["microbatch"])
            == (b["args"]["stage"], b["args"]["microbatch"])
            for a in _around(start, inside)
            for b in _around(ends[start["id"]], inside)
        ]
        assert any(pairs)
        assert start["ts"] < ends[start["id"]]["ts"]


def test_arrows_of_several_panels_have_numbers_of_their_own() -> None:
    used = [event["id"] for event in events(panel(), panel(), phase="s")]
    assert len(used) == len(set(used))


def test_times_without_unit_are_said_to_be_shown_as_milliseconds() -> None:
    said = "Times have no unit: 1 is shown as 1 ms."
    labels = [e["args"] for e in events(panel(), phase="M") if e["name"] == "process_labels"]
    assert [{"labels": said}] == labels
    assert {"unit of time": said} == json.loads(trace([panel()]))["otherData"]
    assert {} == json.loads(trace([unit_panel()]))["otherData"]
    assert "process_labels" not in {e["name"] for e in events(unit_panel(), phase="M")}


def _around(arrow: dict[str, Any], inside: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars that an end of an arrow is in."""
    return [
        bar
        for bar in inside
        if bar["tid"] == arrow["tid"] and bar["ts"] < arrow["ts"] < bar["ts"] + bar["dur"]
    ]


def _num_messages(report: Report) -> int:
    schedule = report.timeline.schedule
    ranks = schedule.placement.ranks
    between = sum(a != b for a, b in pairwise(ranks))
    return 2 * between * schedule.num_microbatches


def test_measured_memory_has_counters_of_its_own() -> None:
    drawn = memory_panel()
    found: dict[str, list[float]] = {}
    for event in events(drawn, phase="C"):
        if event["pid"] == 1:  # The others are of the simulated step.
            found.setdefault(event["name"], []).append(event["args"]["held"])
    for rank, peak in enumerate(drawn.report.measured_peaks):
        planned = found[f"memory of rank {rank} (bytes)"]
        assert drawn.report.ranks[rank].peak_memory == max(planned)
        assert peak == max(found[f"measured memory of rank {rank} (bytes)"])
    assert 2 * 4 == len(found)

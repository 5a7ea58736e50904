"""What every drawing says of a timeline."""

from dataclasses import replace
from math import inf

import pytest
from panels import gathered_panel, memory_panel, overlap_panel, panel, unit_panel

from penstock.draw.colours import colour
from penstock.draw.panel import Kind, Panel, bars, kinds, memory_scale
from penstock.errors import DrawError
from penstock.ir import Backward, BackwardInput, Forward, Overlap
from penstock.passes import add_comms
from penstock.sim import simulate
from penstock.timeline import RecordedStep, Recording


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0 s"), (1, "1 s"), (0.001, "1 ms"), (42e-6, "42 µs")],
)
def test_seconds_are_said_in_the_unit_that_fits(value: float, expected: str) -> None:
    assert expected == unit_panel().time(value)


@pytest.mark.parametrize(("value", "expected"), [(0, "0"), (0.25, "0.25")])
def test_times_without_unit_are_plain_numbers(value: float, expected: str) -> None:
    assert expected == panel().time(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1.5 * 1024**2, "1.5 MiB"),
        (80 * 1024**3, "80 GiB"),
    ],
)
def test_bytes_are_said_in_the_unit_that_fits(value: float, expected: str) -> None:
    assert expected == unit_panel().memory(value)


def test_memory_without_unit_is_a_plain_number() -> None:
    assert "4.5" == panel().memory(4.5)


def test_facts_are_time_bubble_and_memory() -> None:
    expected = "makespan 27 (bubble 11.1%), span 24 (bubble 0.0%), peak memory 7"
    assert expected == panel("ZB-H2").facts


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        (panel("ForwardOnly"), [Kind.FORWARD]),
        (panel("1F1B"), [Kind.FORWARD, Kind.BACKWARD]),
        (panel("ZB-V"), [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]),
        (overlap_panel(), list(Kind)[:4]),
        (
            gathered_panel(),
            [k for k in Kind if k not in (Kind.BACKWARD, Kind.RECOMPUTE)],
        ),
    ],
    ids=lambda one: one.title if isinstance(one, Panel) else "",
)
def test_kinds_are_those_that_occur(drawn: Panel, expected: list[Kind]) -> None:
    assert expected == kinds(drawn.report)


def test_every_kind_has_words_and_a_colour_of_its_own() -> None:
    assert 7 == len({kind.words for kind in Kind})
    assert 7 == len({colour(kind) for kind in Kind})


def test_bars_are_the_computes_with_their_times() -> None:
    found = list(bars(panel("1F1B", 2, 1).report, 1))
    expected = [
        (Forward(1, 0), Kind.FORWARD, 1, 2, "whole"),
        (Backward(1, 0), Kind.BACKWARD, 2, 4, "whole"),
    ]
    assert expected == found


def test_halves_of_an_overlap_share_the_time_and_the_height() -> None:
    report = overlap_panel().report
    timeline = report.timeline
    found = {(bar.action, bar.half): (bar.start, bar.end) for bar in bars(report, 0)}
    overlaps = [n for n, a in enumerate(timeline.schedule.orders[0]) if isinstance(a, Overlap)]
    assert overlaps
    for position in overlaps:
        action = timeline.schedule.orders[0][position]
        assert isinstance(action, Overlap)
        assert isinstance(action.backward, Backward | BackwardInput)
        times = timeline.starts[0][position], timeline.ends[0][position]
        assert times == found[action.forward, "upper"]
        assert times == found[action.backward, "lower"]


def test_sends_and_receives_have_no_bars() -> None:
    plain = panel("1F1B").report
    with_comms = simulate(add_comms(plain.timeline.schedule), plain.costs)
    assert list(bars(plain, 1)) == list(bars(with_comms, 1))


def test_beneath_with_other_ranks_is_refused() -> None:
    four, two = panel("1F1B", ranks=4), panel("1F1B", ranks=2)
    with pytest.raises(DrawError, match=r"beneath has 2 ranks, but the report of 'both' has 4\."):
        Panel("both", four.report, beneath=two.report)


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        ((4.0, 4.0), r"caps has 2 numbers, but the report of 'both' has 4 ranks\. Give one for"),
        ((4.0, 4.0, 4.0, inf), r"caps of 'both' is \(4\.0, .*inf\)\. Expected finite numbers"),
        ((-1.0, 4.0, 4.0, 4.0), r"caps of 'both' is .* Expected finite numbers from 0\."),
    ],
)
def test_caps_other_than_a_number_for_each_rank_are_refused(
    caps: tuple[float, ...], message: str
) -> None:
    with pytest.raises(DrawError, match=message):
        Panel("both", panel("1F1B", ranks=4).report, caps=caps)


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        ((), 4.0),
        ((2.0,) * 4, 4.0),
        ((5.0, 6.0, 2.0, 3.0), 6.0),
        ((8.0,) * 4, 8.0),
        ((9.0,) * 4, 4.0),
    ],
)
def test_memory_scale_has_room_for_the_caps_unless_they_are_far_above(
    caps: tuple[float, ...], expected: float
) -> None:
    drawn = Panel("1F1B", panel("1F1B", ranks=4).report, caps=caps)
    assert 4.0 == drawn.report.peak_memory
    assert expected == memory_scale([drawn, unit_panel()], "")


def test_memory_scale_is_that_of_all_panels_of_a_unit() -> None:
    drawn = [panel("1F1B"), panel("GPipe")]
    assert 8.0 == memory_scale(drawn, "")


def test_panel_of_a_recording_has_the_measured_step_over_the_simulated_one() -> None:
    report = panel("ZB-H1", ranks=3, microbatches=4).report
    recording = Recording((RecordedStep(0, report.timeline),))
    drawn = Panel.of_recording("run", recording)
    assert ("s", "") == (drawn.time_unit, drawn.memory_unit)
    assert report.timeline == drawn.report.timeline
    assert drawn.beneath is not None
    assert report.makespan == pytest.approx(drawn.beneath.makespan)
    in_bytes = Panel.of_recording("run", recording, report.costs)
    assert "bytes" == in_bytes.memory_unit


def test_title_has_only_what_can_be_printed() -> None:
    drawn = Panel("a\n\x1b[1m\udcffb", panel("1F1B").report)
    assert "a\ufffd\ufffd[1m\ufffdb" == drawn.title


def test_facts_have_the_measured_peak_beside_the_planned() -> None:
    drawn = memory_panel()
    assert drawn.facts.endswith("peak memory 128 MiB (measured 129 MiB)")
    assert ["129 MiB", "97 MiB", "65 MiB", "33 MiB"] == drawn.measured_peaks
    assert 129 * 1024**2 == memory_scale([drawn], "bytes")
    assert [] == unit_panel().measured_peaks


def test_measured_memory_is_not_drawn_over_memory_in_another_unit() -> None:
    drawn = memory_panel()
    assert drawn.measured_memory(0)
    without_unit = replace(drawn, memory_unit="")
    assert [] == without_unit.measured_memory(0)
    assert "(measured 129 MiB)" in without_unit.facts

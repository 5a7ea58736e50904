"""The page holds the timelines exactly, needs nothing from outside, and runs nobody's titles."""

import json
import re
from html.parser import HTMLParser

import pytest
from panels import beneath_panel, memory_panel, overlap_panel, panel, schedule, unit_panel

from penstock import schedules
from penstock.costs import CostTable
from penstock.draw.colours import colour
from penstock.draw.panel import Bar, Kind, Panel, bars
from penstock.draw.web_page import LaneData, PageData, TimelineData, page, page_data
from penstock.errors import DrawError
from penstock.ir import Backward, BackwardInput, BackwardWeight, Forward
from penstock.sim import simulate
from penstock.timeline import MemoryPoint, Report

ACTIONS = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}
HALVES = {"w": "whole", "u": "upper", "l": "lower"}
HOSTILE = (
    "</script><script>alert(1)</script><!--<script>\"'&amp;</title><img src=x onerror=alert(2)>"
)


class Reader(HTMLParser):
    """What a browser would make of a page: its elements, and the text in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def data(self) -> PageData:
        """What the script will read."""
        return json.loads(self.texts["script"][0])


def bars_of(timeline: TimelineData) -> list[list[Bar]]:
    return [_bars_of_lane(lane) for lane in timeline["lanes"]]


def _bars_of_lane(lane: LaneData) -> list[Bar]:
    names = ("kinds", "halves", "stages", "microbatches", "starts", "ends")
    columns = (lane[name] for name in names)
    return [
        Bar(ACTIONS[kind](stage, mb), Kind(kind), start, end, HALVES[half])
        for kind, half, stage, mb, start, end in zip(*columns, strict=True)
    ]


def all_bars(report: Report) -> list[list[Bar]]:
    return [list(bars(report, rank)) for rank in range(len(report.ranks))]


PANELS = [
    panel("1F1B"),
    panel("GPipe", 3, 2, costs=CostTable.uniform(3, forward=1 / 3, backward_input=0.1)),
    panel("ZB-V"),
    overlap_panel(),
    unit_panel(),
    beneath_panel(),
    panel("1F1B", 1, 1),
]


@pytest.mark.parametrize("drawn", PANELS, ids=lambda drawn: drawn.title)
def test_data_in_the_page_are_the_panels_timeline_exactly(drawn: Panel) -> None:
    (found,) = Reader(page([drawn])).data()["panels"]
    assert all_bars(drawn.report) == bars_of(found["timeline"])
    assert drawn.report.makespan == found["timeline"]["makespan"]


@pytest.mark.parametrize("drawn", PANELS, ids=lambda drawn: drawn.title)
def test_data_in_the_page_are_the_memory_curves_exactly(drawn: Panel) -> None:
    (found,) = Reader(page([drawn])).data()["panels"]
    curves = [
        [MemoryPoint(*point) for point in zip(curve["times"], curve["held"], strict=True)]
        for curve in found["memory"]
    ]
    assert [drawn.report.memory(rank) for rank in range(len(drawn.report.ranks))] == curves
    assert drawn.report.peak_memory == found["peak_memory"]


def test_data_of_the_page_are_those_of_page_data() -> None:
    drawn = [panel(), beneath_panel()]
    assert page_data(drawn) == Reader(page(drawn)).data()


def test_many_panels_keep_their_order() -> None:
    names = ["GPipe", "1F1B", "ZB-H1", "ZB-H2", "ZB-V"] * 3
    drawn = [panel(name, title=f"{number}: {name}") for number, name in enumerate(names)]
    found = page_data(drawn)["panels"]
    assert [each.title for each in drawn] == [each["title"] for each in found]
    assert [each.report.makespan for each in drawn] == [
        each["timeline"]["makespan"] for each in found
    ]


def test_timeline_beneath_is_a_second_one_and_its_makespan_a_fact() -> None:
    drawn = beneath_panel()
    assert drawn.beneath is not None
    (found,) = page_data([drawn])["panels"]
    (beneath,) = found["beneath"]
    assert all_bars(drawn.beneath) == bars_of(beneath)
    assert {"name": "simulated makespan", "value": "330 ms", "note": "bubble 27.3%"} == found[
        "facts"
    ][-1]


def test_without_a_timeline_beneath_there_is_none() -> None:
    (found,) = page_data([panel()])["panels"]
    assert [] == found["beneath"]
    assert ["makespan", "span", "peak memory"] == [fact["name"] for fact in found["facts"]]


def test_halves_of_an_overlap_are_upper_and_lower() -> None:
    (found,) = page_data([overlap_panel()])["panels"]
    for lane in found["timeline"]["lanes"]:
        assert "ul" in lane["halves"]
        assert {"w"} >= set(re.sub("ul", "", lane["halves"]))


def test_facts_and_the_table_speak_in_the_panels_units() -> None:
    drawn = unit_panel()
    (found,) = page_data([drawn])["panels"]
    assert ("s", "bytes") == (found["time_unit"], found["memory_unit"])
    assert drawn.facts == found["summary"]
    values = [fact["value"] for fact in found["facts"]]
    assert [drawn.time(drawn.report.makespan), drawn.time(drawn.report.span), "128 MiB"] == values
    assert ["128 MiB", "104 MiB", "80 MiB", "56 MiB"] == found["peaks"]


def test_table_has_a_row_for_each_rank() -> None:
    (found,) = page_data([panel()])["panels"]
    names = ["rank", "busy", "warm-up", "steady", "cool-down", "bubble", "peak memory"]
    assert names == found["table"]["header"]
    assert ["1", "24", "5", "0", "4", "27.3%", "3"] == found["table"]["rows"][1]
    assert ["27.3%"] * 4 == found["bubbles"]


def test_memory_that_is_nowhere_held_is_a_flat_curve() -> None:
    costs = CostTable.uniform(4, after_forward=0.0, after_input=0.0)
    (found,) = page_data([panel(costs=costs)])["panels"]
    assert 0.0 == found["peak_memory"]
    assert [{"times": [0.0], "held": [0.0]}] * 4 == found["memory"]


def test_caps_are_given_with_the_scale_that_shows_them() -> None:
    report = panel("1F1B").report
    capped, plain = page_data([Panel("1F1B", report, caps=(5, 4, 3, 2)), Panel("1F1B", report)])[
        "panels"
    ]
    assert ([5, 4, 3, 2], []) == (capped["caps"], plain["caps"])
    assert (5, 5) == (capped["memory_scale"], plain["memory_scale"])


def test_step_that_takes_no_time_has_no_bubble() -> None:
    costs = CostTable.uniform(4, forward=0.0, backward_input=0.0, backward_weight=0.0)
    (found,) = page_data([panel(costs=costs)])["panels"]
    assert ["0.0%"] * 4 == found["bubbles"]


def test_colours_follow_the_place_of_a_stage_on_its_rank() -> None:
    made = schedules.get("Interleaved1F1B")(num_ranks=2, num_microbatches=4, stages_per_rank=3)
    (found,) = page_data([Panel("three stages per rank", simulate(made))])["panels"]
    first, second, third = (colour(Kind.FORWARD, place, 3) for place in range(3))
    expected = [first, first, second, second, third, third]
    assert expected == found["timeline"]["colours"]["F"]


def test_legend_has_only_kinds_that_occur() -> None:
    assert "FB" == "".join(kind["letter"] for kind in page_data([panel("1F1B")])["kinds"])


def test_legend_has_the_kinds_of_all_panels_and_the_most_shades() -> None:
    legend = page_data([panel("1F1B"), panel("ZB-V")])["kinds"]
    words = ["forward", "full backward", "input backward", "weight backward"]
    assert words == [kind["words"] for kind in legend]
    assert [2] * 4 == [len(kind["colours"]) for kind in legend]


def test_legend_has_kinds_that_are_only_beneath() -> None:
    drawn = Panel("1F1B", panel("1F1B").report, beneath=simulate(schedule("ZB-H1")))
    assert "FBIW" == "".join(kind["letter"] for kind in page_data([drawn])["kinds"])


def test_page_asks_nothing_from_outside() -> None:
    text = page([panel(), overlap_panel(), beneath_panel()])
    assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket", text)
    links = [value for _, found in Reader(text).elements for value in (found.get("href"),) if value]
    assert ["data:,"] == links
    assert not any("src" in found for _, found in Reader(text).elements)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("hostile", [HOSTILE, "$data ${script} \\u003c", "é 漢"])
def test_hostile_titles_stay_text(hostile: str) -> None:
    plain, attacked = page([panel(title="plain")]), page([panel(title=hostile)], title=hostile)
    reader = Reader(attacked)
    assert Reader(plain).tags() == reader.tags()
    assert hostile == reader.data()["panels"][0]["title"]
    assert [hostile, hostile, hostile] == [
        reader.texts["title"][0],
        *reader.texts["h1"],
        reader.texts["th"][0],
    ]


def test_facts_are_there_without_scripts() -> None:
    drawn = [panel("1F1B"), unit_panel()]
    reader = Reader(page(drawn))
    assert "noscript" in reader.tags()
    assert [each.title for each in drawn] == reader.texts["th"]
    assert [each.facts for each in drawn] == reader.texts["td"]


def test_page_has_its_title() -> None:
    assert ["Penstock"] == Reader(page([panel()])).texts["h1"]
    assert ["A & B"] == Reader(page([panel()], title="A & B")).texts["title"]


def test_scripts_have_no_way_to_make_html_of_text() -> None:
    script = Reader(page([panel()])).texts["script"][1]
    assert "class Timeline {" in script
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", script)


def test_page_without_panels_is_refused() -> None:
    with pytest.raises(DrawError, match=r"panels is empty\. Give at least one"):
        page([])


def test_measured_memory_is_given_beside_the_planned() -> None:
    (data,) = page_data([memory_panel()])["panels"]
    assert 4 == len(data["measured"])
    assert 129 * 1024**2 == max(data["measured"][0]["held"])
    assert "129 MiB" == data["measured_peaks"][0]
    assert {"name": "measured peak", "value": "129 MiB", "note": ""} in data["facts"]
    assert "measured peak" == data["table"]["header"][-1]
    assert ["33 MiB"] == data["table"]["rows"][3][-1:]
    (plain,) = page_data([unit_panel()])["panels"]
    assert ([], []) == (plain["measured"], plain["measured_peaks"])
    assert "peak memory" == plain["table"]["header"][-1]

"""The page of `draw.save` in a browser: what it shows and says, and that it fetches nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from chromium import canvas_digests, console_errors, open_page, requests_made, resize, wait_until
from drawn_pages import DrawnPage
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from draw.panels import beneath_panel, memory_panel, overlap_panel, panel, unit_panel
from penstock.costs.units import in_memory, in_time
from penstock.draw.colours import colour
from penstock.draw.panel import Kind, Panel, bars
from penstock.draw.web_page import page
from penstock.timeline import RecordedStep, Recording

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script> & <b>bold</b>"


def recorded_panel() -> Panel:
    """As `penstock show` draws a recording: the measured step, and the simulated one beneath."""
    measured = unit_panel("ZB-H1").report
    recording = Recording((RecordedStep(0, measured.timeline),))
    return Panel.of_recording("a run", recording, measured.costs)


@pytest.mark.parametrize(
    "panels",
    [
        pytest.param([panel("1F1B")], id="one"),
        pytest.param([panel("1F1B"), panel("ZB-V"), overlap_panel()], id="three"),
        pytest.param([panel("1F1B"), unit_panel()], id="two units"),
        pytest.param([recorded_panel()], id="recording"),
        pytest.param([panel("GPipe", ranks=1, microbatches=1)], id="smallest"),
        pytest.param([panel("ZB-V", ranks=32, microbatches=128)], id="large"),
    ],
)
def test_page_draws_all_panels_and_asks_the_network_nothing(
    browser: Chrome, tmp_path: Path, panels: list[Panel]
) -> None:
    drawn = DrawnPage(browser, panels, tmp_path)
    titles = [found.text for found in browser.find_elements(By.TAG_NAME, "h2")]
    assert [panel.title for panel in panels] == titles
    assert len(panels) == len(drawn.canvases)
    assert all(number > 5 for number in drawn.numbers_of_colours())
    assert [] == console_errors(browser)
    assert {drawn.path.as_uri()} == {u for u in requests_made(browser) if u != "data:,"}


@pytest.mark.parametrize("made", [panel("1F1B"), panel("ZB-V")], ids=lambda made: made.title)
def test_bars_have_the_colours_of_their_kinds(browser: Chrome, tmp_path: Path, made: Panel) -> None:
    drawn = DrawnPage(browser, [made], tmp_path)
    placement = made.report.timeline.schedule.placement
    for rank in (0, 3):
        stages = placement.stages_of(rank)
        for bar in bars(made.report, rank):
            x, y = drawn.place(bar.start, rank=rank)
            expected = colour(bar.kind, stages.index(bar.action.stage), len(stages))
            # Clear of the edge, and of the number in the middle.
            assert (bar, expected) == (bar, drawn.colour(x + 2, y))


def test_idle_time_has_no_colour_of_a_bar(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    x, y = drawn.place(1.5, rank=3)
    assert drawn.colour(x, y) not in {colour(kind) for kind in Kind}


def test_pointing_at_a_bar_says_what_it_is(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    drawn.point(11, rank=0)
    when = {"start": "10", "end": "12", "duration": "2"}
    expected = ("full backward of microbatch 0", {"stage": "0", "rank": "0", **when}, [])
    assert expected == drawn.told()


def test_bars_of_other_microbatches_turn_pale_on_all_panels(
    browser: Chrome, tmp_path: Path
) -> None:
    drawn = DrawnPage(browser, [panel("1F1B"), panel("ZB-H1")], tmp_path)
    drawn.point(11, rank=0)
    canvas_digests(browser)  # It is painted now.
    (same, y), (other, _) = drawn.place(0, panel=1), drawn.place(1, panel=1)
    assert colour(Kind.FORWARD) == drawn.colour(same + 2, y, panel=1)
    assert colour(Kind.FORWARD) != drawn.colour(other + 2, y, panel=1)


def test_pointing_at_idle_time_says_what_comes_next(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    drawn.point(1.5, rank=3)
    then = ["Then it starts forward of microbatch 0, stage 3."]
    assert ("rank 3 waits 3", {"from": "0", "to": "3"}, then) == drawn.told()


def test_pointing_at_memory_says_how_much_is_held(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    drawn.point(5, rank=0, role="memory")
    heading, numbers, _ = drawn.told()
    assert "rank 0 holds 4" == heading
    assert "4" == numbers["its peak"]


def test_caps_are_drawn_and_told_beside_the_memory(browser: Chrome, tmp_path: Path) -> None:
    report = panel("1F1B").report
    DrawnPage(browser, [Panel("1F1B", report)], tmp_path)
    plain = canvas_digests(browser)
    drawn = DrawnPage(browser, [Panel("1F1B", report, caps=(3.0, 3.0, 3.0, 3.0))], tmp_path)
    assert plain != canvas_digests(browser)
    drawn.point(5, rank=0, role="memory")
    assert "3" == drawn.told()[1]["its cap"]
    assert [] == console_errors(browser)


def test_pointing_at_half_of_an_overlap_names_the_other(browser: Chrome, tmp_path: Path) -> None:
    made = overlap_panel()
    drawn = DrawnPage(browser, [made], tmp_path)
    upper, lower = [bar for bar in bars(made.report, 0) if bar.half != "whole"][:2]
    for part, this, other in ((0.25, upper, lower), (0.75, lower, upper)):
        drawn.point((this.start + this.end) / 2, part=part)
        heading, _, sentences = drawn.told()
        assert f"{this.kind.words} of microbatch {this.action.mb}" == heading
        words = f"{other.kind.words} of microbatch {other.action.mb}, stage {other.action.stage}"
        assert [f"Overlaps with {words}."] == sentences


def test_pointing_beneath_a_measured_lane_says_simulated(browser: Chrome, tmp_path: Path) -> None:
    made = recorded_panel()
    drawn = DrawnPage(browser, [made], tmp_path)
    measured = next(iter(bars(made.report, 0)))
    middle = (measured.start + measured.end) / 2
    drawn.point(middle, role="lane")
    assert ("forward of microbatch 0", []) == drawn.told()[::2]
    assert "11 ms" == drawn.told()[1]["duration"]
    drawn.point(middle, role="beneath")
    assert ("forward of microbatch 0", ["simulated"]) == drawn.told()[::2]


def test_title_with_html_is_shown_as_text(browser: Chrome, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([panel(title=HOSTILE)], title=HOSTILE), encoding="utf-8")
    open_page(browser, path.as_uri())
    shown = [browser.find_element(By.TAG_NAME, tag).text for tag in ("h1", "h2")]
    assert [HOSTILE, HOSTILE] == shown
    assert HOSTILE == browser.title
    assert [] == browser.find_elements(By.CSS_SELECTOR, "img, b")
    assert [] == console_errors(browser)


@pytest.mark.parametrize("width", [320, 400])
def test_narrow_window_needs_no_scrolling_sideways(
    browser: Chrome, tmp_path: Path, width: int
) -> None:
    long = panel("ZB-V", title="x" * 200)
    drawn = DrawnPage(browser, [panel("1F1B"), long, beneath_panel()], tmp_path, width=width)
    for summary in browser.find_elements(By.TAG_NAME, "summary"):
        summary.click()
    for pointed in (0.5, 32.5):  # The tooltip must not widen it either.
        drawn.point(pointed)
        assert width >= browser.execute_script("return document.documentElement.scrollWidth")
        box = drawn.tooltip.rect
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


def test_page_draws_anew_when_the_window_changes(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    plain = canvas_digests(browser)
    resize(browser, 400)
    wait_until(browser, lambda browser: plain != canvas_digests(browser), "another picture")
    [canvas] = drawn.canvases
    assert canvas.size["width"] == int(canvas.get_attribute("width"))
    resize(browser, 1200)
    wait_until(browser, lambda browser: plain == canvas_digests(browser), "the first picture")


@pytest.mark.parametrize("value", [0, 1, 12.3456789, 0.00123, 4.5e-7, 99999.6, 1234567, 5e9, 1e15])
def test_tooltip_has_the_words_of_every_other_drawing(
    browser: Chrome, tmp_path: Path, value: float
) -> None:
    DrawnPage(browser, [panel("1F1B")], tmp_path)
    script = """
      const value = arguments[0];
      return [inWords(value, ""), inWords(value, "s"),
        amountInWords(value, ""), amountInWords(value, "bytes")];
    """
    assert [
        in_time(value, ""),
        in_time(value, "s"),
        in_memory(value, ""),
        in_memory(value, "bytes"),
    ] == browser.execute_script(script, value)


def test_measured_memory_is_drawn_and_told_beside_the_planned(
    browser: Chrome, tmp_path: Path
) -> None:
    measured = memory_panel()
    plain = replace(measured, report=replace(measured.report, measured=()))
    DrawnPage(browser, [plain], tmp_path)
    before = canvas_digests(browser)
    drawn = DrawnPage(browser, [measured], tmp_path)
    assert before != canvas_digests(browser)
    drawn.point(0.1, rank=0, role="memory")
    heading, numbers, _ = drawn.told()
    assert "rank 0 holds 128 MiB" == heading
    assert ("129 MiB", "129 MiB") == (numbers["measured"], numbers["measured peak"])
    assert [] == console_errors(browser)

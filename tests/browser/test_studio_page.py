"""The page of `penstock studio` in a browser, against the real server."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import urlopen

import pytest
from chromium import (
    canvas_digests,
    console_errors,
    open_page,
    requests_made,
    resize,
    wait_until,
)
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from limits import HANG_S
from penstock.schedules import names
from penstock.studio.typed_inputs import DEFAULTS
from studio_process import Studio, studio

pytestmark = pytest.mark.browser

PICTURE_FIELDS = {
    "schedule": "V-Min",
    "beside": "GPipe",
    "ranks": "3",
    "microbatches": "5",
    "forward": "2",
    "backward_input": "1,1,1,3",
    "backward_weight": "0.5",
    "backward": "1.5",
    "delay": "0.4",
    "activation": "2",
    "after_input": "0.25",
    "memory": "3",
}
"""Each changes the picture by itself."""
OTHER_FIELDS = {
    "stages_per_rank",
    "overlap_saving",
    "clock",
    "units",
    "search",
    "lengths",
    "work",
    "recompute",
    "recompute_time",
    "after_dropping",
}


class StudioPage:
    """The page, with what a person does to it and sees of it."""

    def __init__(
        self, browser: Chrome, studio: Studio, *, state: str = "ready", **fields: str
    ) -> None:
        self.browser = browser
        query = urlencode(fields)
        open_page(browser, studio.address + (f"?{query}" if query else ""))
        self.wait(state)

    def wait(self, state: str = "ready") -> None:
        def is_reached(browser: Chrome) -> bool:
            found = browser.execute_script("return document.body.dataset.state")
            return bool(found == state)

        wait_until(self.browser, is_reached, f"the state {state!r}")

    def change(self, field: str, text: str, state: str = "ready") -> None:
        """As a person does: by choosing or typing."""
        element = self.browser.find_element(By.ID, field)
        if element.tag_name == "select":
            Select(element).select_by_value(text)
        else:
            element.send_keys(Keys.CONTROL, "a")
            element.send_keys(Keys.DELETE, *text)
        self.wait(state)

    def text(self, css: str) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, css).text

    def row(self, name: str) -> list[str]:
        """The cells of a schedule; none if it is not in the table."""
        script = "return [...document.querySelectorAll(arguments[0])].map((cell) => cell.innerText)"
        found = self.browser.execute_script(script, f'#table tr[data-name="{name}"] > *')
        return [cell.strip() for cell in found]

    def shown(self) -> list[str]:
        """The titles of the panels."""
        found = self.browser.find_elements(By.CSS_SELECTOR, "#picture h2")
        return [element.text for element in found]

    def fields(self) -> dict[str, str]:
        script = "return document.getElementById(arguments[0]).value"
        return {name: self.browser.execute_script(script, name) for name in DEFAULTS}

    def files(self) -> dict[str, str]:
        links = self.browser.find_elements(By.CSS_SELECTOR, "#files a")
        return {link.text: str(link.get_attribute("href")) for link in links}

    def in_address(self) -> dict[str, str]:
        query = parse_qs(urlsplit(self.browser.current_url).query)
        return {name: value for name, [value] in query.items()}


@pytest.fixture(scope="module")
def running() -> Iterator[Studio]:
    with studio("--port", 0) as running:
        yield running
        assert (0, "") == running.stop()[::2]


@pytest.fixture
def page(browser: Chrome, running: Studio) -> Iterator[StudioPage]:
    """The page as it begins; what it asks for, and that nothing is amiss, is looked at after."""
    yield StudioPage(browser, running)
    assert [] == console_errors(browser)
    asked = {urlsplit(url).netloc for url in requests_made(browser) if url != "data:,"}
    assert {urlsplit(running.address).netloc} == asked


def test_page_begins_with_picture_table_search_and_python(page: StudioPage) -> None:
    assert DEFAULTS == page.fields()
    assert ["ZB-V", "1F1B"] == page.shown()
    rows = page.browser.find_elements(By.CSS_SELECTOR, "#table tbody tr")
    assert {*names(), "searched"} == {row.get_attribute("data-name") for row in rows}
    assert "25.5" == page.row("ZB-V")[1]
    assert "No schedule is faster than 27 (linear)" in page.text("#bound")
    assert 'penstock.schedules.get("ZB-V")(num_ranks=4, num_microbatches=8)' in page.text("#python")
    assert "schedules were tried in" in page.text("#tried")


def test_every_field_is_changed_by_these_tests() -> None:
    assert {*DEFAULTS} == {*PICTURE_FIELDS} | OTHER_FIELDS


@pytest.mark.parametrize(("field", "text"), PICTURE_FIELDS.items())
def test_picture_and_address_follow_a_field(page: StudioPage, field: str, text: str) -> None:
    before = canvas_digests(page.browser)
    page.change(field, text)
    assert before != canvas_digests(page.browser)
    assert {field: text} == page.in_address()
    page.change(field, DEFAULTS[field])
    assert before == canvas_digests(page.browser)
    assert {} == page.in_address()


def test_stages_per_rank_change_schedules_that_take_any(page: StudioPage) -> None:
    before = page.row("Interleaved1F1B")
    page.change("stages_per_rank", "4")
    assert before != page.row("Interleaved1F1B")
    assert "loop, 4 per rank" in page.row("Interleaved1F1B")


def test_overlap_saving_makes_dual_pipe_faster(page: StudioPage) -> None:
    before = page.row("DualPipeV")
    page.change("overlap_saving", "0.5")
    assert float(page.row("DualPipeV")[1]) < float(before[1])


def test_clock_decides_which_time_is_compared(page: StudioPage) -> None:
    page.change("clock", "span")
    assert "span" in page.text("#table thead")
    assert "24" == page.row("ZB-V")[1]


def test_units_are_those_that_are_chosen(page: StudioPage) -> None:
    page.change("units", "seconds and bytes")
    assert "25.5 s" == page.row("ZB-V")[1]
    assert "4 B" == page.row("ZB-V")[3]


def test_search_can_be_thorough_and_off(page: StudioPage) -> None:
    page.change("search", "thorough")
    assert "25.5" == page.row("searched")[1]
    page.change("search", "off")
    assert [] == page.row("searched")


def test_searched_schedule_fits_where_others_do_not_and_can_be_drawn(page: StudioPage) -> None:
    page.change("memory", "1.5")
    assert "needs 4 on rank 0" in page.row("ZB-V")[-1]
    assert "ZB-V needs 4 on rank 0: more than the cap." in page.text("#notes")
    page.change("schedule", "searched")
    assert ["searched", "1F1B"] == page.shown()
    assert "penstock.search(" in page.text("#python")
    assert float(page.row("searched")[3]) <= 1.5


def test_lengths_set_the_microbatches_and_the_picture(page: StudioPage) -> None:
    before = canvas_digests(page.browser)
    page.change("lengths", "4,1,1,2")
    assert "4" == page.fields()["microbatches"]
    alone = canvas_digests(page.browser)
    assert before != alone
    page.change("work", "1,0.5")
    assert alone != canvas_digests(page.browser)
    assert {"lengths": "4,1,1,2", "work": "1,0.5", "microbatches": "4"} == page.in_address()
    page.change("schedule", "searched")
    assert page.text("#said").startswith("Microbatches run in the order ")
    page.change("microbatches", "5", state="wrong")
    assert "lengths has 4 numbers, but there are 5 microbatches." in page.text("#lengths-problem")


def test_lengths_in_the_address_set_the_microbatches(browser: Chrome, running: Studio) -> None:
    page = StudioPage(browser, running, lengths="1,2,3")
    assert "3" == page.fields()["microbatches"]


def test_searches_may_recompute(page: StudioPage) -> None:
    page.change("memory", "1")
    kept = float(page.row("searched")[1])
    page.change("recompute", "yes")
    page.change("schedule", "searched")
    assert "recompute" in page.text("#said")
    assert "recomputation" in page.text("#picture")
    quick = float(page.row("searched")[1])
    assert quick < kept
    page.change("recompute_time", "2")
    slow = float(page.row("searched")[1])
    assert quick < slow
    page.change("after_dropping", "0.9")
    assert slow <= float(page.row("searched")[1])


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("ranks", "many", "ranks is 'many'. Expected a whole number from 1 to 64."),
        ("microbatches", "0", "microbatches is '0'. Expected a whole number from 1 to 512."),
        ("forward", "1,x", "forward is '1,x'. Expected a number from 0 to 1e+15"),
        ("memory", "0.1", "Nothing fits: rank 0 may hold 0.1"),
        ("memory", "1,2", "memory has 2 numbers, but there are 4 ranks."),
        ("overlap_saving", "2", "overlap_saving is '2'. Expected a number from 0 to 1."),
    ],
)
def test_wrong_value_has_its_message_beside_it_and_the_last_picture_stays(
    page: StudioPage, field: str, text: str, expected: str
) -> None:
    before = canvas_digests(page.browser), page.row("ZB-V"), page.text("#python"), page.files()
    page.change(field, text, state="wrong")
    assert page.text(f"#{field}-problem").startswith(expected)
    element = page.browser.find_element(By.ID, field)
    assert "true" == element.get_attribute("aria-invalid")
    after = canvas_digests(page.browser), page.row("ZB-V"), page.text("#python"), page.files()
    assert before == after
    page.change(field, DEFAULTS[field])
    assert "" == page.text(f"#{field}-problem")
    assert element.get_attribute("aria-invalid") is None


def test_schedule_that_cannot_be_made_is_told_beside_it(page: StudioPage) -> None:
    page.change("microbatches", "3")
    page.change("schedule", "DualPipeV", state="wrong")
    assert "DualPipeV needs at least 8" in page.text("#schedule-problem")
    assert ["ZB-V", "1F1B"] == page.shown()
    page.change("microbatches", "8")
    assert ["DualPipeV", "1F1B"] == page.shown()


def test_all_wrong_values_are_told_at_once(page: StudioPage) -> None:
    page.change("ranks", "x", state="wrong")
    page.change("delay", "x", state="wrong")
    assert page.text("#ranks-problem")
    assert page.text("#delay-problem")


def test_slider_follows_the_field_and_the_field_the_slider(page: StudioPage) -> None:
    slider = page.browser.find_element(By.CSS_SELECTOR, "input[aria-label='Ranks, slider']")
    before = canvas_digests(page.browser)
    page.change("ranks", "6")
    assert "6" == slider.get_attribute("value")
    slider.send_keys(Keys.ARROW_RIGHT)
    page.wait()
    assert "7" == page.fields()["ranks"]
    assert before != canvas_digests(page.browser)


def test_dragged_slider_ends_with_the_last_value(page: StudioPage) -> None:
    slider = page.browser.find_element(By.CSS_SELECTOR, "input[aria-label='Microbatches, slider']")
    drag = ActionChains(page.browser).click_and_hold(slider)
    for _ in range(8):
        drag.move_by_offset(3, 0)
    drag.release().perform()
    page.wait()
    assert f"num_microbatches={page.fields()['microbatches']})" in page.text("#python")


@pytest.mark.parametrize(
    ("field", "keys", "expected"),
    [
        ("forward", [Keys.ARROW_UP, Keys.ARROW_UP], "1.2"),
        ("microbatches", [Keys.SHIFT, Keys.ARROW_UP], "18"),
        ("ranks", [Keys.SHIFT, Keys.ARROW_DOWN], "1"),
        ("stages_per_rank", [Keys.ARROW_DOWN], "1"),
        ("memory", [Keys.ARROW_DOWN], "1"),
    ],
)
def test_arrow_keys_step_a_number(
    page: StudioPage, field: str, keys: list[str], expected: str
) -> None:
    page.browser.find_element(By.ID, field).send_keys(*keys)
    page.wait()
    assert expected == page.fields()[field]


def test_slider_has_no_place_for_a_list(page: StudioPage) -> None:
    slider = page.browser.find_element(By.CSS_SELECTOR, "input[aria-label='Forward, slider']")
    assert slider.is_enabled()
    page.change("forward", "1,2")
    assert not slider.is_enabled()


def test_rows_that_fit_come_first_and_the_drawn_ones_are_marked(page: StudioPage) -> None:
    page.change("memory", "3")
    rows = page.browser.find_elements(By.CSS_SELECTOR, "#table tbody tr")
    names = [str(row.get_attribute("data-name")) for row in rows]
    assert ["searched", "V-Half", "V-Min", "ZB-V"] == [
        name for name in names if name in ("searched", "V-Half", "V-Min", "ZB-V")
    ]
    assert "ForwardOnly" == names[-1]
    current = page.browser.find_elements(By.CSS_SELECTOR, "#table tr[aria-current]")
    assert {"ZB-V", "1F1B"} == {row.get_attribute("data-name") for row in current}


def test_picture_keeps_the_focus_when_it_is_drawn_anew(page: StudioPage) -> None:
    script = "document.querySelectorAll('#picture canvas')[1].focus(); form.set('ranks', '5');"
    page.browser.execute_script(f"{script} changed('chosen')")
    page.wait()
    assert page.browser.execute_script(
        "return document.activeElement === document.querySelectorAll('#picture canvas')[1]"
    )


def test_click_on_a_row_draws_it(page: StudioPage) -> None:
    page.browser.find_element(By.CSS_SELECTOR, 'tr[data-name="V-Half"] td').click()
    page.wait()
    assert ["V-Half", "1F1B"] == page.shown()
    assert "V-Half" == page.fields()["schedule"]


def test_quick_changes_end_with_the_last(page: StudioPage) -> None:
    for text in "23456":
        field = page.browser.find_element(By.ID, "ranks")
        field.send_keys(Keys.BACKSPACE, text)
    page.wait()
    assert "num_ranks=6, " in page.text("#python")
    assert {"ranks": "6"} == page.in_address()


def test_address_brings_back_what_was_typed(browser: Chrome, running: Studio) -> None:
    page = StudioPage(browser, running, ranks="2", schedule="GPipe", forward="1,2", beside="")
    assert ["GPipe"] == page.shown()
    assert "forward=[1.0, 2.0]" in page.text("#python")
    browser.refresh()
    page.wait()
    assert ("2", "1,2") == tuple(page.fields()[name] for name in ("ranks", "forward"))
    assert [] == console_errors(browser)


def test_what_is_unknown_in_an_address_is_told(browser: Chrome, running: Studio) -> None:
    page = StudioPage(browser, running, p="8", schedule="none", ranks="2")
    expected = "These parts of the address were not understood: p=8, schedule=none."
    assert expected == page.text("#unknown")
    assert ("2", "ZB-V") == tuple(page.fields()[name] for name in ("ranks", "schedule"))


def test_reset_brings_back_the_beginning(page: StudioPage) -> None:
    page.change("ranks", "2")
    page.change("schedule", "V-Min")
    page.browser.find_element(By.ID, "reset").click()
    page.wait()
    assert DEFAULTS == page.fields()


def test_hostile_address_is_shown_as_text(browser: Chrome, running: Studio) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    page = StudioPage(browser, running, state="wrong", ranks=hostile, memory=hostile)
    assert hostile in page.text("#ranks-problem")
    assert [] == console_errors(browser)


def test_files_are_what_is_drawn(page: StudioPage) -> None:
    page.change("schedule", "V-Half")
    page.change("ranks", "2")
    files = page.files()
    found = {}
    for label, href in files.items():
        with urlopen(href, timeout=HANG_S) as answer:
            found[label] = answer.read()
    assert 2 == len(list(csv.reader(found["CSV"].decode().splitlines())))
    assert b"<svg" in found["SVG"]
    assert found["PNG"].startswith(b"\x89PNG")
    assert b"V-Half" in found["page"]
    assert "traceEvents" in json.loads(found["trace"])
    assert "penstock costs" == json.loads(found["costs"])["format"]


def test_link_saves_a_file_under_its_name(page: StudioPage, tmp_path: Path) -> None:
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.browser.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    page.browser.find_element(By.LINK_TEXT, "CSV").click()
    saved = tmp_path / "zb-v_p4_m8.csv"
    wait_until(page.browser, lambda browser: saved.exists(), "the file")
    assert 4 == len(saved.read_text().splitlines())


def test_python_is_copied(page: StudioPage) -> None:
    allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.browser.execute_cdp_cmd("Browser.grantPermissions", allowed)
    page.browser.find_element(By.ID, "copy").click()
    wait_until(page.browser, lambda browser: "copied" == page.text("#copy"), "the copy")
    script = "const done = arguments[0]; navigator.clipboard.readText().then(done, done)"
    assert page.text("#python") == page.browser.execute_async_script(script).strip()


def test_theme_can_be_changed(page: StudioPage) -> None:
    before = canvas_digests(page.browser)
    page.browser.find_element(By.ID, "theme").click()
    assert before != canvas_digests(page.browser)


def test_narrow_window_needs_no_sideways_scrolling(page: StudioPage) -> None:
    resize(page.browser, 400)
    canvas_digests(page.browser)  # Waits until it is laid out.
    script = "return document.documentElement.scrollWidth"
    assert page.browser.execute_script(script) <= 400


def test_page_says_what_limits_the_searched_schedule(page: StudioPage) -> None:
    page.change("ranks", "2")
    wait_until(page.browser, lambda browser: page.text("#advice"), "advice")
    assert "the step" in page.text("#advice")
    page.change("search", "off")
    assert "" == page.text("#advice")


def test_large_pipeline_is_drawn(page: StudioPage) -> None:
    page.change("search", "off")
    page.change("ranks", "32")
    page.change("microbatches", "128")
    assert ["ZB-V", "1F1B"] == page.shown()
    assert page.row("DualPipeV")[1]


def test_stopped_studio_is_told_and_found_again_when_it_is_back(browser: Chrome) -> None:
    with studio("--port", 0) as first:
        page = StudioPage(browser, first)
        port = urlsplit(first.address).port
        first.stop()
        page.change("ranks", "2", state="gone")
        expected = "The studio has stopped. Start it again with: penstock studio"
        assert expected == page.text("#status")
        assert ["ZB-V", "1F1B"] == page.shown()
    console_errors(browser)  # The browser notes that it could not connect.
    with studio("--port", port):
        page.change("ranks", "3")
        assert "num_ranks=3, " in page.text("#python")
        assert [] == console_errors(browser)

"""The page of `draw.save` in a browser: what its buttons, the wheel, a drag and the keys do."""

from pathlib import Path

import pytest
from chromium import canvas_digests, open_page, set_system_theme, wait_until
from drawn_pages import DrawnPage
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from draw.panels import panel, unit_panel

pytestmark = pytest.mark.browser

BACKGROUND = "return getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(19, 23, 28)"


def test_leaving_hides_the_tooltip_and_all_marks(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    plain = canvas_digests(browser)
    drawn.point(11)
    assert drawn.tooltip.is_displayed()
    drawn.leave()
    assert not drawn.tooltip.is_displayed()
    assert plain == canvas_digests(browser)


def test_buttons_zoom_and_show_all_again(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B"), panel("ZB-V")], tmp_path)
    plain = canvas_digests(browser)
    drawn.button("Zoom in").click()
    twice = canvas_digests(browser)
    drawn.button("Zoom in").click()
    four_times = canvas_digests(browser)
    assert 3 == len({tuple(seen) for seen in (plain, twice, four_times)})
    drawn.button("Zoom out").click()
    assert twice == canvas_digests(browser)
    drawn.button("Zoom in").click()
    drawn.button("Show the whole time").click()
    assert plain == canvas_digests(browser)
    drawn.button("Zoom out").click()  # There is no more to see.
    assert plain == canvas_digests(browser)


def test_wheel_zooms_about_the_pointer_on_all_panels_of_the_unit(
    browser: Chrome, tmp_path: Path
) -> None:
    drawn = DrawnPage(browser, [panel("1F1B"), panel("ZB-V"), unit_panel()], tmp_path)
    plain = canvas_digests(browser)
    x, _ = drawn.place(10.5)
    width = drawn.place(12)[0] - x
    drawn.roll(-400, 10.5)
    assert x == pytest.approx(drawn.place(10.5)[0], abs=1)
    assert 2 * width < drawn.place(12)[0] - x
    drawn.leave()
    first, second, other = canvas_digests(browser)
    assert plain[0] != first
    assert plain[1] != second
    assert plain[2] == other
    drawn.double_click(10.5)
    drawn.leave()
    assert plain == canvas_digests(browser)


def test_wheel_scrolls_the_page_only_when_it_cannot_zoom(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B") for _ in range(5)], tmp_path)
    scrolled = "return scrollY"
    drawn.roll(-400, 10)
    drawn.roll(200, 10)
    canvas_digests(browser)  # Frames, in which it would scroll.
    assert 0 == browser.execute_script(scrolled)
    drawn.button("Show the whole time").click()
    drawn.roll(200, 10)
    wait_until(browser, lambda browser: browser.execute_script(scrolled) > 0, "the page to scroll")


def test_dragging_moves_the_time(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    drawn.button("Zoom in").click()
    x, _ = drawn.place(15)
    drawn.drag(100, 15)
    assert x + 100 == pytest.approx(drawn.place(15)[0], abs=1)
    drawn.drag(-100, 15)
    assert x == pytest.approx(drawn.place(15)[0], abs=1)


def test_keys_zoom_move_and_show_all_again(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    [plain] = canvas_digests(browser)
    seen = [plain]
    for key in ("+", Keys.ARROW_RIGHT, Keys.ARROW_LEFT, "-"):
        drawn.press(key)
        seen += canvas_digests(browser)
    _, zoomed, moved, back, whole = seen
    assert 3 == len({plain, zoomed, moved})
    assert (zoomed, plain) == (back, whole)
    drawn.press("+", "+", Keys.ARROW_RIGHT, "0")
    assert [plain] == canvas_digests(browser)


def test_shift_with_an_arrow_goes_from_bar_to_bar(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    plain = canvas_digests(browser)
    places = []
    right, left, down, up = Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_DOWN, Keys.ARROW_UP
    for key in (right, right, right, down, left, up, up):
        drawn.press_shift(key)
        heading, numbers, _ = drawn.told()
        places.append((heading[-1], numbers["rank"], numbers["start"]))
    assert [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "0", "2"),
        ("1", "1", "2"),
        ("0", "1", "1"),
        ("1", "0", "1"),
        ("1", "0", "1"),  # There is no rank above.
    ] == places
    assert plain != canvas_digests(browser)
    drawn.press(Keys.ESCAPE)
    assert not drawn.tooltip.is_displayed()
    assert plain == canvas_digests(browser)


def test_stepping_moves_the_time_to_bars_that_are_not_seen(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    drawn.press("+", "+")
    drawn.press_shift(Keys.ARROW_RIGHT)
    assert "0" == drawn.told()[1]["start"]
    x, _ = drawn.place(0.5)
    assert 0 <= x <= drawn.canvases[0].size["width"]


def test_memory_button_hides_and_shows_memory(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    [canvas] = drawn.canvases
    plain, height = canvas_digests(browser), canvas.size["height"]
    button = drawn.button("Show the memory of each rank")
    assert "true" == button.get_attribute("aria-pressed")
    button.click()
    assert "false" == button.get_attribute("aria-pressed")
    assert plain != canvas_digests(browser)
    assert canvas.size["height"] < height
    button.click()
    assert plain == canvas_digests(browser)
    assert height == canvas.size["height"]


def test_theme_button_changes_all_colours(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    light = canvas_digests(browser)
    assert LIGHT == browser.execute_script(BACKGROUND)
    drawn.button("Show in dark colours").click()
    assert DARK == browser.execute_script(BACKGROUND)
    assert light != canvas_digests(browser)
    drawn.button("Show in light colours").click()
    assert LIGHT == browser.execute_script(BACKGROUND)
    assert light == canvas_digests(browser)


def test_theme_follows_the_system_and_the_address(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    light = canvas_digests(browser)
    set_system_theme(browser, "dark")
    dark = canvas_digests(browser)
    assert DARK == browser.execute_script(BACKGROUND)
    assert light != dark
    open_page(browser, f"{drawn.path.as_uri()}#light")
    set_system_theme(browser, "dark")
    assert light == canvas_digests(browser)
    open_page(browser, f"{drawn.path.as_uri()}#dark")
    assert dark == canvas_digests(browser)


def test_printing_leaves_the_page_as_it_was(browser: Chrome, tmp_path: Path) -> None:
    drawn = DrawnPage(browser, [panel("1F1B")], tmp_path)
    drawn.button("Show in dark colours").click()
    drawn.leave()
    before = canvas_digests(browser)
    assert browser.print_page()
    assert before == canvas_digests(browser)

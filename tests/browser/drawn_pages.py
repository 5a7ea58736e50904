"""Opens the page of some panels as its reader does, from a file, and points at what it shows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chromium import open_page
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from penstock import draw
from penstock.draw import Panel

# Where a time is on a rank's row of a panel, in pixels of its canvas.
_PLACE = """
const [panel, rank, role, time, part] = arguments;
const lanes = timeline.all[panel];
const row = lanes.rows.find((row) => row.rank === rank && row.role === role);
return [lanes.x(time), row.y + row.height * part].map(Math.round);
"""
_COLOUR = """
const [panel, x, y] = arguments;
const pen = document.querySelectorAll("canvas")[panel].getContext("2d");
const part = (value) => value.toString(16).padStart(2, "0");
return "#" + [...pen.getImageData(x, y, 1, 1).data].slice(0, 3).map(part).join("");
"""
_NUMBER_OF_COLOURS = """
return [...document.querySelectorAll("canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
});
"""


class DrawnPage:
    """A page that is open; a place is given by panel, rank, what is there, and time."""

    def __init__(
        self, browser: Chrome, panels: Sequence[Panel], folder: Path, *, width: int = 1200
    ) -> None:
        self.browser = browser
        self.path = folder / "page.html"
        draw.save(panels, self.path)
        open_page(browser, self.path.as_uri(), width=width)

    @property
    def canvases(self) -> list[WebElement]:
        return self.browser.find_elements(By.TAG_NAME, "canvas")

    def button(self, label: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, f"button[aria-label='{label}']")

    def place(
        self,
        time: float,
        *,
        panel: int = 0,
        rank: int = 0,
        role: str = "lane",
        part: float = 0.5,
    ) -> tuple[int, int]:
        """In pixels of the canvas; `part` is 0 at the top of the row, and 1 at its bottom."""
        x, y = self.browser.execute_script(_PLACE, panel, rank, role, time, part)
        return x, y

    def colour(self, x: int, y: int, *, panel: int = 0) -> str:
        return self.browser.execute_script(_COLOUR, panel, x, y)

    def numbers_of_colours(self) -> list[int]:
        """For each canvas; an empty one has a single colour."""
        return self.browser.execute_script(_NUMBER_OF_COLOURS)

    def point(self, time: float, **place: Any) -> None:
        canvas, x, y = self._from_middle(time, **place)
        self._chain().move_to_element_with_offset(canvas, x, y).perform()

    def leave(self) -> None:
        """To the heading, where nothing is."""
        heading = self.browser.find_element(By.TAG_NAME, "h1")
        self._chain().move_to_element(heading).perform()

    def double_click(self, time: float, **place: Any) -> None:
        canvas, x, y = self._from_middle(time, **place)
        self._chain().move_to_element_with_offset(canvas, x, y).double_click().perform()

    def drag(self, right: int, time: float, **place: Any) -> None:
        """Moves what is there by so many pixels."""
        canvas, x, y = self._from_middle(time, **place)
        chain = self._chain().move_to_element_with_offset(canvas, x, y).click_and_hold()
        chain.move_by_offset(right, 0).release().perform()

    def roll(self, down: int, time: float, **place: Any) -> None:
        """Turns the wheel there."""
        origin = ScrollOrigin.from_element(*self._from_middle(time, **place))
        self._chain().scroll_from_origin(origin, 0, down).perform()

    def press(self, *keys: str) -> None:
        """On the canvas of the first panel."""
        self.browser.execute_script("arguments[0].focus()", self.canvases[0])
        self._chain().send_keys(*keys).perform()

    def press_shift(self, key: str) -> None:
        self.browser.execute_script("arguments[0].focus()", self.canvases[0])
        self._chain().key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    def _chain(self) -> ActionChains:
        return ActionChains(self.browser, duration=0)

    def _from_middle(
        self, time: float, *, panel: int = 0, **place: Any
    ) -> tuple[WebElement, int, int]:
        """The canvas and the place on it, counted from its middle as selenium does."""
        canvas = self.canvases[panel]
        x, y = self.place(time, panel=panel, **place)
        return canvas, x - canvas.size["width"] // 2, y - canvas.size["height"] // 2

    @property
    def tooltip(self) -> WebElement:
        return self.browser.find_element(By.CLASS_NAME, "tooltip")

    def told(self) -> tuple[str, dict[str, str], list[str]]:
        """What the tooltip says: its heading, its numbers by name, and its sentences."""
        texts = {
            tag: [found.text for found in self.tooltip.find_elements(By.CSS_SELECTOR, tag)]
            for tag in (".name", "dt", "dd", "p")
        }
        [heading] = texts[".name"]
        return heading, dict(zip(texts["dt"], texts["dd"], strict=True)), texts["p"]

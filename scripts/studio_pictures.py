"""Takes the pictures of the studio for the README and the docs."""

import sys
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

from selenium.webdriver import Chrome

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "browser")]

FIELDS = {"schedule": "searched", "beside": "", "memory": "3", "forward": "1,1,1,1.4"}
WIDTH, HEIGHT = 1240, 1340


def take(browser: Chrome, address: str, theme: Literal["light", "dark"], path: Path) -> None:
    from chromium import canvas_digests, open_page, set_system_theme, wait_until

    open_page(browser, f"{address}?{urlencode(FIELDS)}", width=WIDTH, height=HEIGHT)
    set_system_theme(browser, theme)
    script = "return document.getElementById('advice').children.length > 0"
    wait_until(browser, lambda browser: browser.execute_script(script), "all answers")
    canvas_digests(browser)  # Waits until all is painted.
    browser.save_screenshot(str(path))


def main() -> None:
    from chromium import chromium

    from studio_process import studio

    pictures = ROOT / "docs" / "pictures"
    with chromium() as browser, studio("--port", 0) as running:
        take(browser, running.address, "light", pictures / "studio.png")
        take(browser, running.address, "dark", pictures / "studio_dark.png")


if __name__ == "__main__":
    main()

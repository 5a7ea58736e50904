"""Drives Debian's chromium, without a window, for tests of pages.

    def test_page_does_something(browser: Chrome, tmp_path: Path) -> None:   # The fixture.
        open_page(browser, (tmp_path / "page.html").as_uri(), width=400)
        before = canvas_digests(browser)
        browser.find_element(By.ID, "more").click()
        wait_until(browser, lambda browser: browser.title == "More", "the title")
        assert before != canvas_digests(browser)
        assert [] == console_errors(browser)
        assert "https://example.org/" not in requests_made(browser)

- `open_page` loads a page, in a light theme and at a given size, and forgets the one before.
- `resize` gives the page another size, `set_system_theme` another theme.
- `wait_until` calls a condition until it is met and returns what that gave.
- `canvas_digests` has a digest of what each canvas shows, after all painting that is under way.
- `console_errors` and `requests_made` tell what came since they were last called.

The browser reaches this machine alone: any other host has no address.
"""

import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.wait import WebDriverWait

from limits import HANG_S
from process_marks import end_with_the_tests

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-pipe",  # It ends when its driver does.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)

Found = TypeVar("Found")


def missing_programs() -> list[str]:
    """What scripts/browser would install."""
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


@contextmanager
def chromium() -> Iterator[Chrome]:
    """A browser with an empty profile, which leaves neither a file nor a process behind."""
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as folder:
        # All that it writes goes there.
        places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), folder)
        service = ChromeService(
            shutil.which("chromedriver"),
            env={**os.environ, **places},
            popen_kw={"start_new_session": True, "preexec_fn": end_with_the_tests},
        )
        try:
            browser = Chrome(_options(Path(folder, "profile")), service)
            try:
                browser.set_page_load_timeout(HANG_S)
                browser.set_script_timeout(HANG_S)
                yield browser
            finally:
                browser.quit()
        finally:
            _kill(service)


def _options(profile: Path) -> ChromeOptions:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return options


def _kill(service: ChromeService) -> None:
    """Ends what outlived the browser's own end: all of it is in the group of the driver."""
    process = getattr(service, "process", None)
    if process is None:  # It could not be started.
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(HANG_S)


def open_page(browser: Chrome, url: str, *, width: int = 1200, height: int = 900) -> None:
    """Loads a page anew, even if it is the one that is there."""
    browser.get("about:blank")
    resize(browser, width, height)
    set_system_theme(browser, "light")
    console_errors(browser)
    requests_made(browser)
    browser.get(url)


def resize(browser: Chrome, width: int, height: int = 900) -> None:
    """Makes the page so many CSS pixels large, each of them one of the screen."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def set_system_theme(browser: Chrome, theme: Literal["light", "dark"]) -> None:
    """What the page takes for the wish of its reader."""
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def wait_until(browser: Chrome, condition: Callable[[Chrome], Found], what: str) -> Found:
    """What the condition gives when it is true of the page, or an error that says `what`."""
    waiting = WebDriverWait(
        browser, HANG_S, poll_frequency=0.05, ignored_exceptions=[WebDriverException]
    )
    try:
        return waiting.until(condition)
    except TimeoutException:
        raise AssertionError(
            f"waited {HANG_S:g} s for {what}, in vain; console: {console_errors(browser)}"
        ) from None


def canvas_digests(browser: Chrome) -> list[str]:
    """What each canvas shows. Two that are alike show the same."""
    # The first frame paints what was asked for until now; the second begins when that is done.
    pictures = browser.execute_async_script(
        """
        const done = arguments[0];
        requestAnimationFrame(() => requestAnimationFrame(() => done(
          [...document.querySelectorAll("canvas")].map((canvas) => canvas.toDataURL()))));
        """
    )
    return [hashlib.sha256(picture.encode()).hexdigest() for picture in pictures]


def console_errors(browser: Chrome) -> list[str]:
    """The warnings and errors on the console since the last call."""
    entries = browser.get_log("browser")
    return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]


def requests_made(browser: Chrome) -> list[str]:
    """The addresses that were asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]

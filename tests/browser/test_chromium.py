"""What the tests of pages rely on: what is seen of a page, and that no process is left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import chromium
import pytest
from chromium import canvas_digests, console_errors, open_page, requests_made, resize, wait_until
from selenium.webdriver import Chrome

from limits import HANG_S, PROCESS_S
from process_marks import marked, processes_with

pytestmark = pytest.mark.browser


def address_of(text: str, folder: Path) -> str:
    (folder / "page.html").write_text(f"<!doctype html>{text}", encoding="utf-8")
    return (folder / "page.html").as_uri()


def test_errors_and_warnings_are_seen_once(browser: Chrome, tmp_path: Path) -> None:
    url = address_of("<script>console.log(1); console.warn('oh'); missing()</script>", tmp_path)
    open_page(browser, url)
    warning, error = console_errors(browser)
    assert "oh" in warning
    assert "missing is not defined" in error
    assert [] == console_errors(browser)


def test_requests_are_seen_and_lead_nowhere_outside(browser: Chrome, tmp_path: Path) -> None:
    url = address_of("<img src=http://example.org/picture.png>", tmp_path)
    open_page(browser, url)
    assert [url, "http://example.org/picture.png"] == requests_made(browser)
    assert [] == requests_made(browser)
    [error] = console_errors(browser)
    assert "ERR_NAME_NOT_RESOLVED" in error


def test_page_before_is_forgotten(browser: Chrome, tmp_path: Path) -> None:
    url = address_of("<script>missing()</script>", tmp_path)
    open_page(browser, url)
    open_page(browser, "data:text/html,<p>quiet")
    assert [] == console_errors(browser)
    assert url not in requests_made(browser)


def test_digest_tells_what_a_canvas_shows(browser: Chrome, tmp_path: Path) -> None:
    open_page(browser, address_of("<canvas></canvas><canvas></canvas>", tmp_path))
    blank, other = canvas_digests(browser)
    assert blank == other
    browser.execute_script(
        "const pen = document.querySelector('canvas').getContext('2d');"
        "requestAnimationFrame(() => pen.fillRect(0, 0, 1, 1));"
    )
    first, second = canvas_digests(browser)
    assert blank == second
    assert blank != first


def test_page_has_the_size_asked_for(browser: Chrome) -> None:
    size = "return [innerWidth, innerHeight]"
    open_page(browser, "about:blank", width=400, height=500)
    assert [400, 500] == browser.execute_script(size)
    resize(browser, 1300)
    assert [1300, 900] == browser.execute_script(size)


def test_waiting_gives_what_was_found(browser: Chrome) -> None:
    open_page(browser, "data:text/html,<title>here")
    assert "here" == wait_until(browser, lambda browser: browser.title, "a title")


def test_waiting_in_vain_says_for_what_and_the_console(
    browser: Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chromium, "HANG_S", 0.1)
    open_page(browser, address_of("<script>missing()</script>", tmp_path))
    with pytest.raises(AssertionError, match=r"for a title, in vain; .*missing is not defined"):
        wait_until(browser, lambda browser: browser.title, "a title")


@pytest.mark.usefixtures("browser")  # Skips where there is none.
@pytest.mark.parametrize("ends", ["well", "by an error", "without its driver"])
def test_no_process_is_left_behind(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with marked() as (mark, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        try:
            with chromium.chromium() as browser:
                browser.get("about:blank")
                assert len(processes_with(mark)) > 2
                if ends == "by an error":
                    raise InterruptedError
                if ends == "without its driver":
                    os.kill(browser.service.process.pid, signal.SIGKILL)
        except InterruptedError:
            pass
        assert {} == left_of(mark)


@pytest.mark.usefixtures("browser")
def test_no_process_is_left_behind_when_the_tests_are_killed() -> None:
    code = (
        "import os, signal, chromium\n"
        "with chromium.chromium() as browser:\n"
        "    browser.get('about:blank')\n"
        "    print('opened', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The folder of a test has too long a name for chromium's sockets.
    folder = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
    with folder, marked() as (mark, environment):
        killed = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env={
                **os.environ,
                **environment,
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "TMPDIR": folder.name,
            },
            stdout=subprocess.PIPE,
            timeout=PROCESS_S,
        )
        assert (b"opened\n", -signal.SIGKILL) == (killed.stdout, killed.returncode)
        assert {} == left_of(mark)


def left_of(mark: str) -> dict[int, bytes]:
    """The processes that do not end: some see a little later that the others have gone."""
    deadline = time.monotonic() + HANG_S
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left

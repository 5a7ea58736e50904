"""The browser that tests of pages share."""

import os
from collections.abc import Iterator

import pytest
from chromium import chromium, missing_programs
from selenium.webdriver import Chrome


@pytest.fixture(scope="session")
def browser() -> Iterator[Chrome]:
    """Its functions are in tests/browser/chromium.py."""
    if missing_programs():
        needed = "needs chromium and chromedriver: see scripts/browser"
        if os.environ.get("CI"):
            pytest.fail(needed)  # Nobody would see that they were skipped.
        pytest.skip(needed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "localhost,127.0.0.1")  # The driver is on this machine.
        with chromium() as browser:
            yield browser

"""Makes every test run repeatable: one thread, one seed, fixed hypothesis examples."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

from fuzzing import IS_LONG, beyond, long_tests

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

    from network_hosts import Hosts

torch.set_num_threads(1)
gc.disable()  # Until all tests are collected: what is made until then is there to stay.

settings.register_profile(
    "penstock",
    derandomize=True,
    deadline=None,
    # How fast examples are drawn depends on the machine, and must not decide a test.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")


def pytest_report_header() -> str:
    return f"torch: {torch.__version__}, threads: {torch.get_num_threads()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make fuzz` or `make test-all` runs; begin with what takes the longest.

    That is what starts processes of its own: one that began last would be waited for alone.
    """
    items.sort(key=lambda item: "pool" in getattr(item, "fixturenames", ()))
    if IS_LONG:
        return
    left_out = {
        item for item in items if any(m.kwargs.get("is_long") for m in item.iter_markers("fuzz"))
    }
    if os.environ.get("PENSTOCK_TESTS") == "quick":
        left_out |= set(beyond(long_tests(), items))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    hide_from_collector()
    gc.enable()


def hide_from_collector() -> None:
    """Hide what is there to stay from the collector, which many tests call again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _modules_loaded_late() -> Iterator[None]:
    """Hide what the tests of a file have loaded too, such as torch's compiler."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 50:
        hide_from_collector()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def browser() -> "Iterator[Chrome]":
    """Chromium, for the tests in tests/browser; its functions are in chromium.py there."""
    from chromium import chromium, missing_programs

    if missing_programs():
        needed = "needs chromium and chromedriver: see scripts/browser"
        if os.environ.get("CI"):
            pytest.fail(needed)  # Nobody would see that they were skipped.
        pytest.skip(needed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "localhost,127.0.0.1")  # The driver is on this machine.
        with chromium() as browser:
            yield browser


@pytest.fixture(scope="session")
def hosts() -> "Iterator[Hosts]":
    """Three hosts on one machine, for the tests in tests/hosts."""
    from network_hosts import Hosts, missing

    if reason := missing():
        pytest.skip(reason)
    with Hosts(3) as hosts:
        yield hosts

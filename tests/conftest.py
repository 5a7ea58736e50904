"""Makes every test run repeatable: one thread, one seed, fixed hypothesis examples."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# `fuzz` is for the tests that draw random networks: @settings(settings.get_profile("fuzz")).
settings.register_profile(
    "penstock",
    derandomize=True,
    deadline=None,
    # How fast examples are drawn depends on the machine, and must not decide a test.
    suppress_health_check=[HealthCheck.too_slow],
)
_EXAMPLES = 500
_wanted = int(os.environ.get("PENSTOCK_FUZZ_EXAMPLES", _EXAMPLES))
settings.register_profile(
    "fuzz",
    parent=settings.get_profile("penstock"),
    max_examples=_wanted,
    # A longer run is there to find what the usual examples do not: it draws new ones.
    derandomize=_wanted <= _EXAMPLES,
    print_blob=True,
)
settings.load_profile("penstock")


def pytest_report_header() -> str:
    return f"torch: {torch.__version__}, threads: {torch.get_num_threads()}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

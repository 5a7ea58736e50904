"""Makes every test run repeatable: one thread, one seed, fixed hypothesis examples."""

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

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


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

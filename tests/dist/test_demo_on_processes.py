"""`penstock demo` through its real entry point."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from limits import PROCESS_S
from penstock import Recording

pytestmark = pytest.mark.dist

PENSTOCK = [sys.executable, "-m", "penstock"]


def test_demo_trains_and_shows_both_schedules(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PENSTOCK, "demo", "--steps=4", f"--folder={tmp_path / 'demo'}"],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert "1F1B, measured" in done.stdout
    assert "ZB-V, measured" in done.stdout
    assert "The losses of all 4 steps are equal to the last bit." in done.stdout
    figures = json.loads((tmp_path / "demo" / "figures.json").read_text())
    assert ["1F1B", "ZB-V"] == [found["schedule"] for found in figures]
    for found in figures:
        assert 4 == len(found["losses"])
        assert found["losses"][-1] < found["losses"][0] - 0.5
    # The same microbatches in the same order of additions, split or not.
    assert figures[0]["losses"] == figures[1]["losses"]
    for name, stages in (("baseline.json", 2), ("run.json", 4)):
        assert stages == Recording.load(tmp_path / "demo" / name).schedule.num_stages

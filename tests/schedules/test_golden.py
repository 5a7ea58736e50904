"""Every algorithm draws the schedule that was reviewed, for 4 ranks and 8 microbatches.

After a change that is meant, `PENSTOCK_UPDATE_GOLDEN=1 pytest tests/schedules/test_golden.py`
writes the files in tests/golden anew. Review them like code: `git diff tests/golden`.
"""

import os
from pathlib import Path

import pytest

from penstock.schedules import REGISTRY, Generator

GOLDEN = Path(__file__).parents[1] / "golden"
SUFFIX = "_p4_m8.txt"


def golden_file(generator: Generator) -> Path:
    return GOLDEN / f"{generator.name.lower().replace('-', '_')}{SUFFIX}"


@pytest.mark.parametrize("generator", REGISTRY, ids=lambda generator: generator.name)
def test_schedule_is_drawn_as_reviewed(generator: Generator) -> None:
    drawn = f"{generator(num_ranks=4, num_microbatches=8)}\n"
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN") == "1":
        golden_file(generator).write_text(drawn)
    assert golden_file(generator).read_text() == drawn


def test_every_golden_schedule_is_of_a_registered_algorithm() -> None:
    expected = sorted(map(golden_file, REGISTRY))
    assert expected == sorted(GOLDEN.glob(f"*{SUFFIX}"))

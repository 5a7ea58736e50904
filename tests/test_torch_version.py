"""Another version of torch than the tested ones gives one warning, whichever way in is taken."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.torch_version import REQUIREMENT, TESTED, is_tested, versions_tested
from test_layers import MAY_USE

ROOT = Path(__file__).parents[1]
# The command line loads torch only in commands that need it, by one of the other ways in.
ROOMS = sorted(
    room
    for room, may in MAY_USE.items()
    if "torch" in may.split() and room not in ("cli", "training")
)
WAYS_IN = [
    *(f"import penstock.{room}" for room in ROOMS),
    "import penstock.training.trainer",
    "import penstock; penstock.PipelineStage; penstock.split_args_kwargs_into_chunks",
    "from penstock import *",
]
# Torch, and what Penstock uses of it, is loaded once; a fork of its own takes each way in.
TAKE_WAYS_IN = """
import os, sys, warnings
import torch, torch.distributed.checkpoint, torch.export
for version, way_in in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.stdout.flush()
    if not os.fork():
        torch.__version__ = version
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(way_in)
            exec("import penstock.microbatches, penstock.comm, penstock.backward")
        print(*(str(warning.message) for warning in caught), sep="|", flush=True)
        os._exit(0)
    assert 0 == os.wait()[1]
"""


def test_other_version_warns_once_by_every_way_in_and_the_tested_ones_do_not() -> None:
    expected = (
        "Found torch 2.16.0+cpu, but Penstock is tested with torch 2.13, 2.14 or 2.15 only, and "
        "relies on parts of torch that change between versions. "
        'Install a tested version with: pip install "torch>=2.13,<2.16". '
        "If you keep this one, compare gradients with those of the whole model first."
    )
    tries = [("2.16.0+cpu", way_in) for way_in in WAYS_IN]
    tested = ["2.13.0+cpu", "2.13.1", "2.14.1", "2.15.0+cu132"]
    tries += [(version, WAYS_IN[-1]) for version in tested]
    args = [arg for one_try in tries for arg in one_try]
    done = subprocess.run(
        [sys.executable, "-c", TAKE_WAYS_IN, *args], capture_output=True, text=True
    )
    assert 0 == done.returncode, done.stderr
    warned = dict(zip(tries, done.stdout.splitlines(), strict=True))
    assert {one_try: "" if one_try[0] in tested else expected for one_try in tries} == warned


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0", True),
        ("2.13.1", True),
        ("2.13.0+cpu", True),
        ("2.13.0+cu130", True),
        ("2.12.1", False),
        ("2.14.1", True),
        ("2.15.0+cu132", True),
        ("2.16.0a0+git1234567", False),
        ("2.130.0", False),
        ("3.13.0", False),
    ],
)
def test_patch_and_build_of_a_version_do_not_matter(version: str, expected: bool) -> None:
    assert expected == is_tested(version)


def test_version_is_the_same_wherever_it_is_said() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert REQUIREMENT in project["dependencies"]
    major, minor = map(int, TESTED[-1].split("."))
    assert f"torch>={TESTED[0]},<{major}.{minor + 1}" == REQUIREMENT
    assert f"torch=={TESTED[0]}." in (ROOT / "constraints.txt").read_text()
    readme, start = (ROOT / "README.md").read_text(), (ROOT / "docs" / "start.md").read_text()
    assert f"torch {TESTED[0]} is installed" in readme
    assert f"torch {versions_tested()}" in readme
    assert f"`{REQUIREMENT}`" in start
    assert f"torch {versions_tested()}" in start

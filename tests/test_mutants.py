"""Every mutant of scripts/mutants can be planted in the source as it is now."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
MAIN = ROOT / "scripts" / "mutants" / "main.py"
ROOMS = sorted(path.stem for path in (MAIN.parent / "lists").glob("*.py"))


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("scripts_mutants", MAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where its dataclass looks for it.
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.mark.parametrize("room", ROOMS)
def test_each_mutant_fits_one_place_and_names_tests_that_exist(
    room: str, script: ModuleType
) -> None:
    """Eighteen mutants once no longer applied, so that nobody could run their lists."""
    wrong = []
    mutants = script.read_list(room)
    for mutant in mutants:
        path = ROOT / "src" / "penstock" / mutant.file
        count = path.read_text().count(mutant.old) if path.exists() else 0
        if count != 1:
            wrong.append(
                f"{room} {mutant.number}: {mutant.old!r} is in {mutant.file} {count} times"
            )
        if mutant.old == mutant.new:
            wrong.append(f"{room} {mutant.number}: changes nothing")
        wrong += [
            f"{room} {mutant.number}: there is no {word}"
            for word in mutant.tests.split()
            if word.startswith("tests/") and not (ROOT / word.partition("::")[0]).exists()
        ]
    assert mutants
    assert [] == wrong

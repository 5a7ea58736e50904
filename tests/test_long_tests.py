"""The list of tests that `make test` leaves out names tests that exist."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fuzzing import beyond, long_tests

ROOT = Path(__file__).parents[1]


def test_listed_tests_exist() -> None:
    def exists(name: str) -> bool:
        path, *_, test = name.split("::")
        file = ROOT / path
        return file.exists() and f"def {test}(" in file.read_text()

    gone = [name for name in long_tests() if not exists(name)]
    assert [] == gone, "Rename them in tests/long_tests.txt too, or remove their lines."


def test_first_cases_stay() -> None:
    names = ["a.py::b[0]", "a.py::b[1]", "a.py::c", "a.py::b[2]", "a.py::d"]
    items = [cast(Any, SimpleNamespace(nodeid=name)) for name in names]
    left_out = [item.nodeid for item in beyond({"a.py::b": 1, "a.py::c": 0}, items)]
    assert ["a.py::b[1]", "a.py::c", "a.py::b[2]"] == left_out

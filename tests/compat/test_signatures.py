"""Names, arguments and errors of torch's classes are compat's, but for reviewed exceptions.

The installed torch is compared: with `make test TORCH=2.15.0`, that is another one.
"""

from pathlib import Path

import pytest
import signatures
import torch

REASONS = Path(__file__).with_name("reasons.txt")
VERSION = ".".join(torch.__version__.split(".")[:2])


def read_reasons(version: str) -> dict[str, str]:
    """The known differences from a version of torch, with their reasons."""
    found: dict[str, str] = {}
    reason = ""
    for line in REASONS.read_text().splitlines():
        if line.startswith("reason "):
            reason = line.removeprefix("reason ")
        elif line and not line.startswith("#"):
            first, _, rest = line.partition(" ")
            is_versioned = first.replace(".", "").isdigit()
            if not is_versioned or first == version:
                found[rest if is_versioned else line] = reason
    return found


def test_each_difference_has_a_reason() -> None:
    known = read_reasons(VERSION)
    assert [] == [found for found in signatures.differences() if found not in known]


def test_each_reason_is_still_needed() -> None:
    assert set() == set(read_reasons(VERSION)) - set(signatures.differences())


def test_each_known_difference_has_its_reason() -> None:
    assert all(read_reasons("2.13").values())
    assert set(read_reasons("2.13")) < set(read_reasons("2.15"))


class Theirs:
    def __init__(self, a: int, b: int = 2) -> None: ...

    def step(self, x: int, *, y: int = 1) -> None: ...


Theirs.__module__ = "torch.distributed.pipelining.stage"


class Moved:
    def __init__(self, b: int = 2, a: int = 0) -> None: ...

    def step(self, x: int, **kwargs: int) -> None: ...


class Lacking:
    def __init__(self, a: int, b: int = 3, *, c: int) -> None: ...


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (Theirs, []),
        (
            Moved,
            [
                "K(a) is at another position",
                "K(b) is at another position",
                "K.step(y) is missing",
            ],
        ),
        (
            Lacking,
            [
                "K(b) has the default 3, not 2",
                "K(c) is needed by compat only",
                "K.step is missing",
            ],
        ),
    ],
)
def test_differences_are_found(ours: type, expected: list[str]) -> None:
    assert expected == list(signatures._compare("K", Theirs, ours))


def test_error_of_another_kind_is_found() -> None:
    assert ["E is not a RuntimeError"] == list(signatures._compare("E", RuntimeError, KeyError))

"""What the watch says of a dead rank."""

from typing import Any

import pytest

from penstock.watch.finding import Finding

FOUND = Finding(3, "beta", "stages 1, 6", "was killed by SIGKILL", "in step 4")


def test_a_finding_names_rank_host_stages_reason_and_place() -> None:
    assert "rank 3 (host beta, stages 1, 6) was killed by SIGKILL, in step 4" == str(FOUND)
    bare = Finding(3, "beta", "", "does not answer", "outside of a step")
    assert "rank 3 (host beta) does not answer, outside of a step" == str(bare)


def test_a_finding_survives_its_message() -> None:
    assert FOUND == Finding.of(FOUND.as_message())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({}, "a finding lacks a part"),
        ([], "a finding lacks a part"),
        (FOUND.as_message() | {"more": 1}, "a finding lacks a part"),
        (FOUND.as_message() | {"rank": "3"}, "a finding has a part of another type"),
        (FOUND.as_message() | {"host": None}, "a finding has a part of another type"),
    ],
)
def test_another_message_is_refused(message: Any, expected: str) -> None:
    with pytest.raises(ConnectionError, match=expected):
        Finding.of(message)

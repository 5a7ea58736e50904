"""Starting ranks: who is one, and whose failure is told."""

import signal

import pytest

from penstock.training.launching import STOPPED_BY_ANOTHER, Failure, first_cause, is_worker


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), False),
        (("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), True),
        (("RANK", "WORLD_SIZE", "MASTER_ADDR"), False),
        (("RANK", "WORLD_SIZE"), False),  # Some machines set these for all that runs on them.
        (("WORLD_SIZE", "MASTER_ADDR"), False),
    ],
)
def test_rank_knows_itself_by_its_environment(names: tuple[str, ...], expected: bool) -> None:
    assert expected == is_worker(dict.fromkeys(names, "0"))


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ((-signal.SIGTERM, 1), 1),  # The launcher ends those that are left by SIGTERM.
        ((STOPPED_BY_ANOTHER, 1), 1),
        ((STOPPED_BY_ANOTHER, STOPPED_BY_ANOTHER), 0),
        ((-signal.SIGTERM, STOPPED_BY_ANOTHER), 1),
        ((STOPPED_BY_ANOTHER, -signal.SIGKILL), 1),
        # Who lost the connection to a process that was killed may not know that this was it.
        ((1, -signal.SIGKILL), 1),
    ],
)
def test_of_several_failures_the_first_cause_is_told(codes: tuple[int, ...], cause: int) -> None:
    failed = [Failure(rank, 100 + rank, code) for rank, code in enumerate(codes)]
    assert cause == first_cause(failed).rank

"""The processes that tests with real ranks share, and a check that tests leave none behind."""

import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import pytest

from limits import HANG_S
from process_marks import marked, processes_with
from worker_pool import WorkerPool, fork_with_torch


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def fresh_pool(pool: WorkerPool) -> Iterator[WorkerPool]:
    """The pool with processes of its own for one file.

    For tests that make device meshes: torch remembers a mesh by its ranks, with groups that may be
    gone when the next test makes one.
    """
    pool.kill()
    yield pool
    pool.kill()


@pytest.fixture(scope="session")
def _shared_servers() -> None:
    """Start the servers that outlive a test: the one that forks workers, and Python's own."""
    fork_with_torch()
    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _leaves_no_process(_shared_servers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a program that a test has started is still there at its end; it is killed then.

    Forks of the server are not marked: the pool and the launcher end their own.
    """
    with marked() as (mark, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield
        until_s = time.monotonic() + HANG_S
        while processes_with(mark) and time.monotonic() < until_s:
            time.sleep(0.05)  # It may be ending.
        assert [] == list(processes_with(mark))

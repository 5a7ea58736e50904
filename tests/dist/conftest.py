"""The processes that tests with real ranks share."""

from collections.abc import Iterator

import pytest

from worker_pool import WorkerPool


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

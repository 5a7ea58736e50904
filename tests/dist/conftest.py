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

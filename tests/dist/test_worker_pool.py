"""The pool that other tests rely on: what comes back, and that nothing is left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from limits import HANG_S, PROCESS_S
from worker_pool import WorkerError, WorkerPool

pytestmark = pytest.mark.dist


def _sum_of_ranks(group: dist.ProcessGroup, offset: Tensor) -> tuple[int, Tensor]:
    total = offset + dist.get_rank(group)
    dist.all_reduce(total, group=group)
    return dist.get_rank(group), total


def _fail_on(group: dist.ProcessGroup, rank: int) -> None:
    if dist.get_rank(group) == rank:
        raise ValueError("as was asked for")


def _hang(group: dist.ProcessGroup) -> None:
    while True:
        time.sleep(1)


def _leave(group: dist.ProcessGroup) -> None:
    os._exit(3)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_answers(num_ranks: int, pool: WorkerPool) -> None:
    total = 10 * num_ranks + sum(range(num_ranks))
    results: list[Any] = pool.run(num_ranks, _sum_of_ranks, torch.tensor([10.0]))
    assert [(rank, total) for rank in range(num_ranks)] == [(r, x.item()) for r, x in results]


def test_failure_is_reported_and_the_next_call_works(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 1 failed:.*ValueError: as was asked for"):
        pool.run(2, _fail_on, 1)
    assert [None, None] == pool.run(2, _fail_on, 5)


@pytest.mark.parametrize(
    ("function", "timeout_s", "message"),
    [
        (_hang, 0.5, r"no answer from ranks \[0, 1\]"),  # The limit is what is tested.
        (_leave, PROCESS_S, "the process of rank . has ended"),
    ],
)
def test_workers_that_hang_or_end_are_replaced(
    function: Any, timeout_s: float, message: str, pool: WorkerPool
) -> None:
    pool.run(1, _fail_on, 1)
    pids = pool.pids
    with pytest.raises(WorkerError, match=message):
        pool.run(2, function, timeout_s=timeout_s)
    assert [] == [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from worker_pool import WorkerPool\n"
        "if __name__ == '__main__':\n"
        "    pool = WorkerPool()\n"
        "    pool._start()\n"
        "    print(*pool.pids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    here = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": here, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    pids = list(map(int, done.stdout.split()))
    assert 4 == len(pids), done.stderr
    until_s = time.monotonic() + HANG_S
    while any(_is_running(pid) for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert [] == [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    """Whether the process is there and no zombie: without a parent, nobody may collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

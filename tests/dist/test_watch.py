"""Ranks that are dead are named soon; ranks that compute for long, or end well, are not."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from failing_ranks import Explosive, Session, make_pipeline, note_failure, step

from launcher import FOR_RANKS
from limits import HANG_S, PROCESS_S
from penstock.watch.hub import SILENT_S
from process_marks import end_with_the_tests

pytestmark = pytest.mark.dist

VICTIM = 1
NAMED_S = 10.0  # What users are promised.
LONG_S = SILENT_S + 2


def _hold_the_interpreter(seconds: float) -> None:
    """Compute in one call of C, which lets no other thread of this process run."""
    began_s = time.monotonic()
    sum(range(10**6))
    per_s = 10**6 / (time.monotonic() - began_s)
    while (left_s := began_s + seconds - time.monotonic()) > 0:
        sum(range(int(per_s * max(left_s, 0.1))))


def _compute_for_long(rank: int, num_ranks: int) -> None:
    """One rank computes for longer than a silent host is waited for; another comes much later."""

    def burn(call: int) -> None:
        if call == 3:
            _hold_the_interpreter(LONG_S)

    is_slow = rank == VICTIM
    module_of = lambda stage: Explosive(burn if is_slow else None)  # noqa: E731
    step(make_pipeline(rank, num_ranks, module_of=module_of), 2)


def _stop(rank: int, num_ranks: int) -> None:
    """One rank stops itself in its third step; the test lets it go on."""

    def burn(call: int) -> None:
        if call == 2 * 2 * num_ranks + 2:
            note_failure()
            Path(os.environ["PENSTOCK_TEST_FOLDER"], "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    is_victim = rank == VICTIM
    module_of = lambda stage: Explosive(burn if is_victim else None)  # noqa: E731
    step(make_pipeline(rank, num_ranks, module_of=module_of), 4)


def _hang(rank: int, num_ranks: int) -> None:
    """One rank is stopped, and the others wait for it in a collective of their own."""
    step(make_pipeline(rank, num_ranks))
    if rank == VICTIM:
        note_failure()
        Path(os.environ["PENSTOCK_TEST_FOLDER"], "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def _end_apart(rank: int, num_ranks: int) -> None:
    """Ranks end one after the other, the hub somewhere among them."""
    step(make_pipeline(rank, num_ranks))
    time.sleep(0.5 * rank)


@contextlib.contextmanager
def _session(folder: Path, num_ranks: int, *scenarios: Any) -> Iterator[Session]:
    named = [(scenario.__name__, scenario) for scenario in scenarios]
    with Session(folder, num_ranks, named) as session:
        yield session
        session.join(PROCESS_S)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("stopped")
    with _session(folder, 3, _compute_for_long, _stop) as session:
        assert session.comes("stopped", PROCESS_S)
        for rank in (0, 2):
            assert session.comes(f"_stop rank{rank}", HANG_S)
        os.kill(session.processes[VICTIM].pid or 0, signal.SIGCONT)
    return session


def test_a_rank_that_computes_for_long_is_not_suspected(stopped: Session) -> None:
    for report in stopped.reports("_compute_for_long"):
        assert [] == report.kinds, report.trace
        assert report.seconds > LONG_S


def test_a_stopped_rank_is_named_soon_with_where_it_was(stopped: Session) -> None:
    failed_at = float((stopped.folder / "failed_at").read_text())
    for rank in (0, 2):
        report = stopped.report("_stop", rank)
        assert report.is_a("CommError"), report.trace
        assert f"because rank {VICTIM} (host " in report.text
        place = "in 1F1 (forward of microbatch 1 on stage 1)."
        assert report.text.endswith(place), report.text
        assert ", stage 1) has been stopped by a signal for 5 s, in step " in report.text
        assert report.ended_at - failed_at < NAMED_S


def test_a_rank_that_goes_on_learns_that_it_was_given_up(stopped: Session) -> None:
    report = stopped.report("_stop", VICTIM)
    assert report.is_a("CommError"), report.trace
    assert "this rank was given up by the others: rank 1 (host " in report.text


def test_a_rank_that_waits_in_a_collective_of_the_user_ends(tmp_path: Path) -> None:
    with _session(tmp_path, 3, _hang) as session:
        assert session.comes("stopped", PROCESS_S)
        until_s = time.monotonic() + HANG_S
        others = [session.processes[rank] for rank in (0, 2)]
        for process in others:
            process.join(max(until_s - time.monotonic(), 0))
        assert [1, 1] == [process.exitcode for process in others]
        os.kill(session.processes[VICTIM].pid or 0, signal.SIGKILL)


def test_ranks_that_end_at_different_times_accuse_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with _session(tmp_path, 3, _end_apart) as session:
        pass
    assert [[]] * 3 == [report.kinds for report in session.reports("_end_apart")]
    assert [0, 0, 0] == [process.exitcode for process in session.processes]
    assert "" == capfd.readouterr().err


SCRIPT = """
import os

import torch
import penstock

model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
x = torch.ones(4, 4)
pipe = penstock.parallelize(
    model, (x,), loss_fn=torch.nn.functional.mse_loss, num_microbatches=2, schedule="1F1B"
)
pipe.step(x, target=x)
if os.environ["RANK"] == "1":
    raise ValueError("in a loop of the user's own")
pipe.pipeline.gather(None, "to wait for ever")
"""


def test_a_rank_that_ends_by_an_error_of_its_own_is_named(tmp_path: Path) -> None:
    """The others wait for it in the store, which no connection ends."""
    (tmp_path / "script.py").write_text(SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    where["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py")],
            env={**os.environ, **FOR_RANKS, **where, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_the_tests,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=PROCESS_S)[1] for process in processes]
    assert [1, 1] == [process.returncode for process in processes]
    said = errors[0].splitlines()[-1]
    assert "CommError: rank 0 stopped waiting for all ranks to wait for ever, because " in said
    assert said.endswith(", stage 1) ended with exit status 1, outside of a step.")


def _kill(rank: int, num_ranks: int) -> None:
    pipeline = make_pipeline(rank, num_ranks)
    step(pipeline)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    step(pipeline)


def test_without_the_watch_a_killed_rank_is_a_lost_connection(tmp_path: Path) -> None:
    with Session(tmp_path, 2, [("kill", _kill)], watch="0") as session:
        session.join(PROCESS_S)
    report = session.report("kill", 0)
    assert report.is_a("CommError"), report.trace
    assert f" on rank {VICTIM}, because the connection was lost (" in report.text
    end = "The other process ended without reporting an error: see its logs."
    assert report.text.endswith(end)

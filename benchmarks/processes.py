"""Runs a function on several ranks: processes of this machine, joined by gloo, one thread each."""

import ctypes
import os
import pickle
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MESSAGE_TIMEOUT = timedelta(seconds=60)  # A rank that waits longer than this has failed.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Without these, who pays for pages that were freed before depends on who ran before.
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}


def run_ranks(
    work: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float,
    pin_to_cores: bool = False,
) -> Any:
    """What `work(*args)` returns on rank 0. However this ends, no process is left behind."""
    cores: list[int] | None = None
    if pin_to_cores:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < num_ranks:
            sys.exit(f"{num_ranks} cores are needed, one for each rank; there are {len(cores)}.")
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        rank_args = (work, num_ranks, args, folder, cores)
        context = mp.spawn(_run_rank, rank_args, nprocs=num_ranks, join=False)
        try:
            _join(context, timeout_s)
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return pickle.loads((Path(folder) / "result").read_bytes())


def _join(context: mp.ProcessContext, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=2):
            if time.monotonic() >= deadline:
                sys.exit(f"Not done after {timeout_s:.0f} s: all ranks were ended.")
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as exc:
        sys.exit(f"Rank {exc.error_index} failed, see above: all ranks were ended.\n{exc.msg}")


def _run_rank(
    rank: int,
    work: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    folder: str,
    cores: list[int] | None,
) -> None:
    _end_with_parent()
    try:
        if cores is not None:
            os.sched_setaffinity(0, {cores[rank]})
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", num_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=MESSAGE_TIMEOUT
        )
        result = work(*args)
        if rank == 0:
            (Path(folder) / "result").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        print(f"Rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)  # An orderly end could wait for messages that never come.


def _end_with_parent() -> None:
    """Be killed when the process that started this one ends, however it does."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _without_output(options: list[str]) -> list[str]:
    """Leave out `--save FILE`, which says nothing about the results."""
    place = options.index("--save") if "--save" in options else len(options)
    return options[:place] + options[place + 2 :]


def environment() -> dict[str, str]:
    """What results are to be read with."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "options": " ".join(_without_output(sys.argv[1:])),
    }

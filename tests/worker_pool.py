"""Processes that wait for work, for tests that need real ranks.

To start a process and load torch in it takes seconds, so a session starts them once, as forks of
a server that has loaded torch. What they run is a function at the top of a module, called as
`function(group, *args)`.
"""

import gc
import io
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from limits import HANG_S, PROCESS_S

# The groups that there are, by their number of ranks; each has the first of the workers.
GROUP_SIZES = (1, 2, 4, 8)
# What carries the messages of pipelines: the second as between machines.
LINKS = ("shared memory", "gloo")
PRELOADED = [
    *("torch._dynamo", "torch.distributed", "penstock.runtime"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer"),
]
os.environ["HF_HUB_OFFLINE"] = "1"  # Before transformers is loaded.


def fork_with_torch() -> ForkServerContext:
    """Return what starts processes in which torch is loaded, but nothing of this process is.

    They are forks of a server that does nothing else, so that no thread is forked midway. It loads
    transformers too, if it is installed: that takes each process that needs it three seconds.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class WorkerError(Exception):
    """A worker's function failed, or took too long; says what each of them reported."""


class _Failed(NamedTuple):
    """What comes back in place of a result."""

    report: str
    is_consequence: bool
    """Whether this worker was stopped by the failure of another."""


class WorkerPool:
    """Four processes with a gloo group, or more. They start when they are first needed."""

    def __init__(self, num_workers: int = 4) -> None:
        self._num_workers = num_workers
        self._workers: list[tuple[Any, connection.Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        link: str = "shared memory",
        timeout_s: float = PROCESS_S,
    ) -> list[Any]:
        """Call `function(group, *args)` on the first `num_ranks` workers; returns their results.

        Pipelines that connect meanwhile use `link`, one of `LINKS`, between the workers.
        If one of them fails, or does not answer in time, all workers are ended: the next call
        starts new ones.
        """
        assert num_ranks in GROUP_SIZES
        assert num_ranks <= self._num_workers
        assert link in LINKS
        if not self._workers:
            self._start()
        code = sys.modules[function.__module__].__file__
        assert code is not None
        task = _dump((num_ranks, function, args, link))
        used = self._workers[:num_ranks]
        try:
            for _, channel in used:
                channel.send_bytes(pickle.dumps(str(Path(code).parent)))
                channel.send_bytes(task)
            results = self._collect(used, timeout_s)
        except BaseException:  # Ctrl-C too: nobody will take what the workers still send.
            self.kill()
            raise
        failed = {rank: r for rank, r in enumerate(results) if isinstance(r, _Failed)}
        if failed:
            self.kill()
            first_causes = sorted(failed.items(), key=lambda item: item[1].is_consequence)
            raise WorkerError(
                "\n".join(f"rank {rank} failed:\n{found.report}" for rank, found in first_causes)
            )
        return results

    def close(self) -> None:
        """End the workers, by force if they do not end by themselves."""
        for _, channel in self._workers:
            channel.close()  # To a worker that waits for work this says that there is none.
        until_s = time.monotonic() + HANG_S
        for process, _ in self._workers:
            process.join(max(until_s - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        """End the workers at once."""
        for process, channel in self._workers:
            channel.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
            process.close()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._workers]

    def _start(self) -> None:
        context = fork_with_torch()
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-tests-")
        store = str(Path(self._folder.name, "store"))
        for rank in range(self._num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, self._num_workers, store, theirs), daemon=True
            )
            self._workers.append((process, ours))
            process.start()
            theirs.close()  # Only the worker's own end is left, so it tells when the worker ends.
        try:
            self._collect(self._workers, PROCESS_S)
        except BaseException:
            self.kill()
            raise

    def _collect(
        self, workers: list[tuple[Any, connection.Connection]], timeout_s: float
    ) -> list[Any]:
        """One answer from each; raises if it takes too long or a worker has ended."""
        until_s = time.monotonic() + timeout_s
        answers: list[Any] = [None] * len(workers)
        waiting = {channel: rank for rank, (_, channel) in enumerate(workers)}
        while waiting:
            ready = connection.wait(list(waiting), max(until_s - time.monotonic(), 0))
            if not ready:
                silent = sorted(waiting.values())
                raise WorkerError(f"no answer from ranks {silent}: {timeout_s} s")
            for channel in ready:
                assert isinstance(channel, connection.Connection)
                rank = waiting.pop(channel)
                try:
                    answers[rank] = pickle.loads(channel.recv_bytes())
                except EOFError:
                    raise WorkerError(f"the process of rank {rank} has ended") from None
        return answers


class _Pickler(pickle.Pickler):
    """Writes plain tensors by way of numpy, which is many times as fast as torch's own."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and not obj.requires_grad and obj.dtype != torch.bfloat16:
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _dump(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _work(rank: int, num_workers: int, store: str, channel: connection.Connection) -> None:
    """What a worker does: join the groups, then answer until there is no more work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which will end us.
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_workers,
        timeout=timedelta(seconds=HANG_S),
    )
    groups = {
        size: dist.group.WORLD if size == num_workers else dist.new_group(list(range(size)))
        for size in GROUP_SIZES
        if size <= num_workers
    }
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # Loads what torch loads late.
    gc.freeze()  # Torch itself is there to stay: a collection need not look at it each time.
    channel.send_bytes(_dump("ready"))
    while True:
        try:
            path = pickle.loads(channel.recv_bytes())
            task = channel.recv_bytes()
        except EOFError:
            break
        if path not in sys.path:
            sys.path.insert(0, path)
        channel.send_bytes(_answer(task, groups))
    gc.collect()  # What still holds a group, such as a reducer in a cycle, must go before it.
    dist.destroy_process_group()


def _answer(task: bytes, groups: dict[int, Any]) -> bytes:
    try:
        num_ranks, function, args, link = pickle.loads(task)
        os.environ["PENSTOCK_SHARED_MEMORY"] = "0" if link == "gloo" else "1"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return _dump(function(groups[num_ranks], *args))
    except BaseException as error:
        from penstock.errors import CommError  # Late: the pool does not depend on what it tests.

        return _dump(_Failed(traceback.format_exc(), isinstance(error, CommError)))
    finally:
        gc.collect()  # One test's pipelines must not end in the middle of the next.


def end_with_parent() -> None:
    """Wait for the end of the tests, however they end, and end this process then."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)

"""Ranks on several hosts, of which one is killed, stopped or cut off at a chosen place."""

import ctypes
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import penstock
from limits import HANG_S, PROCESS_S
from network_hosts import Hosts
from penstock.ir import BackwardInput, BackwardWeight, Forward
from worker_pool import fork_with_torch

FAULTS = ("kill", "stop", "cut")
PLACES = ("F", "I", "W", "a message", "a collective", "the checkpoint")
_KINDS: dict[str, Any] = {"F": Forward, "I": BackwardInput, "W": BackwardWeight}
_WIDTH, _STEPS = 8, 6
_PORT = 29500


class Fault(NamedTuple):
    """What happens to one rank, where it is then, and in which of its steps."""

    kind: str
    place: str
    victim: int
    step: int


class Named(NamedTuple):
    """When a rank learned of a dead one, and what it said."""

    after_s: float
    text: str


class _Noting(logging.Handler):
    """Writes down when the first dead rank was named."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if not self._path.exists():
            text = json.dumps([time.time(), record.getMessage()])
            self._path.with_suffix(".new").write_text(text)
            self._path.with_suffix(".new").rename(self._path)


class _Inflicted:
    """The fault, on the rank that it happens to."""

    def __init__(self, fault: Fault, hosts: Hosts, host: int, folder: Path) -> None:
        self._fault, self._hosts, self._host, self._folder = fault, hosts, host, folder

    def strike(self) -> None:
        (self._folder / "struck.new").write_text(str(time.time()))
        if self._fault.kind == "cut":
            self._hosts.cut(self._host)
        (self._folder / "struck.new").rename(self._folder / "struck")
        if self._fault.kind != "cut":
            os.kill(os.getpid(), signal.SIGKILL if self._fault.kind == "kill" else signal.SIGSTOP)

    def strike_later(self) -> None:
        """Strike while the main thread waits for others, who come later."""
        timer = threading.Timer(random.uniform(0.05, 0.3), self.strike)
        timer.daemon = True
        timer.start()


def _train(rank: int, num_ranks: int, fault: Fault, inflicted: _Inflicted, folder: Path) -> None:
    """Steps with a collective and a checkpoint after each; the fault comes in one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_ranks)))
    x = torch.ones(2 * num_ranks, _WIDTH)
    pipe = penstock.parallelize(
        model,
        example=(x,),
        loss_fn=nn.functional.mse_loss,
        num_microbatches=2 * num_ranks,
        schedule="ZB-H1",
        timeout=HANG_S,
    )
    is_victim = rank == fault.victim
    now = [0]
    mb = random.randrange(2 * num_ranks)

    def in_an_action(action: Any, context: Any) -> None:
        if now[0] == fault.step and action.mb == mb:
            inflicted.strike()
        context.run(action)

    def come_late(action: Any, context: Any) -> None:
        if now[0] == fault.step and action.mb == mb:
            time.sleep(0.5)
        context.run(action)

    pipeline = pipe._pipeline
    if fault.place in _KINDS and is_victim:
        pipeline.register_custom_function(_KINDS[fault.place], in_an_action)
    if fault.place == "a message" and not is_victim:
        pipeline.register_custom_function(Forward, come_late)
    for step in range(_STEPS):
        now[0] = step
        is_now = is_victim and step == fault.step
        if is_now and fault.place == "a message":
            inflicted.strike_later()
        pipe.step(x, target=x)
        if is_now and fault.place == "a collective":
            inflicted.strike_later()
        elif step == fault.step and fault.place == "a collective":
            time.sleep(0.5)
        dist.all_reduce(torch.ones(1))
        if is_now and fault.place == "the checkpoint":
            inflicted.strike_later()
        elif step == fault.step and fault.place == "the checkpoint":
            time.sleep(0.5)
        pipe.save(folder / "checkpoint")


def _run_rank(
    rank: int, layout: Sequence[int], hosts: Hosts, fault: Fault, folder: Path, seed: int
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG: with the fork server.
    with open(folder / f"log {rank}", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    hosts.enter(layout[rank])
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": hosts.address(layout[0])}
    os.environ |= {"MASTER_PORT": str(_PORT), "RANK": str(rank), "WORLD_SIZE": str(len(layout))}
    torch.set_num_threads(1)
    random.seed(seed)
    logging.getLogger("penstock").addHandler(_Noting(folder / f"named {rank}"))
    logging.getLogger("penstock").addHandler(logging.StreamHandler())
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_S))
    inflicted = _Inflicted(fault, hosts, layout[rank], folder)
    try:
        _train(rank, len(layout), fault, inflicted, folder)
    except Exception as error:
        (folder / f"raised {rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def strike(
    hosts: Hosts, layout: Sequence[int], fault: Fault, folder: Path, *, seed: int = 0
) -> dict[int, Named]:
    """Run ranks until all that are left have ended; return what each said of the dead one.

    `layout` has the host of each rank. A cut link is mended at the end, and a stopped rank killed.
    """
    context = fork_with_torch()
    others = [rank for rank in range(len(layout)) if rank != fault.victim]
    processes = [
        context.Process(target=_run_rank, args=(rank, layout, hosts, fault, folder, seed))
        for rank in range(len(layout))
    ]
    try:
        for process in processes:
            process.start()
        waited_for = range(len(layout)) if fault.kind == "cut" else others
        until_s = time.monotonic() + PROCESS_S
        for rank in waited_for:
            processes[rank].join(max(until_s - time.monotonic(), 0))
        assert not any(processes[rank].is_alive() for rank in waited_for), "ranks hang"
    finally:
        if fault.kind == "cut":
            hosts.mend(layout[fault.victim])
        _end(processes)
    struck_at = float((folder / "struck").read_text())
    named = {}
    for rank in waited_for:
        with suppress(FileNotFoundError):
            at, text = json.loads((folder / f"named {rank}").read_text())
            named[rank] = Named(at - struck_at, text)
    return named


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(HANG_S)


def until(holds: Callable[[], bool], limit_s: float) -> bool:
    """Wait until something holds; return whether it does in time."""
    until_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True

"""Does a long training on two hosts end with the losses of an undisturbed one, despite faults?

Each host runs torchrun with one rank, again and again until it succeeds. At random moments, a rank
is killed, a rank is stopped, or the link between the hosts is cut for a while.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]
from faulty_ranks import FAULTS, until
from network_hosts import Hosts, missing
from process_marks import marked, processes_with

PENSTOCK = [sys.executable, "-m", "penstock", "train"]
MODEL = ["--layers=2", "--width=16", "--heads=2", "--context=8", "--batch=4", "--microbatches=2"]
MODEL += ["--ranks=2", "--schedule=ZB-H1", "--every=100"]
CUT_S = 20.0
"""How long a link stays cut."""
STALLED_S = 300.0
ENDING_S = 60.0


class Struck(NamedTuple):
    """A fault, and what it cost."""

    kind: str
    rank: int
    step: int
    lost_steps: int
    back_after_s: float
    """The time until the next step that was not known before."""


class Soak:
    """The training on two hosts, and the steps that it has reported so far."""

    def __init__(self, hosts: Hosts, folder: Path, num_steps: int, mark: dict[str, str]) -> None:
        self._hosts, self._folder, self._num_steps = hosts, folder, num_steps
        restartable = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._environment = hosts.environment() | mark | restartable
        self.losses: dict[int, float] = {}
        self.repeated: list[int] = []
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=self._keep_up, args=(host,)) for host in range(2)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(ENDING_S)
        if self.is_running:
            self.problems.append("a launcher is still there")

    def _keep_up(self, host: int) -> None:
        """Run the launcher of a host until it succeeds: what a service manager would do."""
        torchrun = self._hosts.torchrun(host, num_hosts=2, per_host=1, how="c10d")
        torchrun += ["--max-restarts=10", "-m", "penstock", "train"]
        options = [f"--checkpoint={self._folder}/run", f"--steps={self._num_steps}", "--json"]
        for attempt in range(10):
            with open(self._folder / f"errors {host} {attempt}", "w") as errors:
                process = self._hosts.start(
                    host,
                    [*torchrun, *MODEL, *options],
                    env=self._environment,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                with process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        self._note(json.loads(line))
            if process.returncode == 0:
                return
            time.sleep(1)
        self.problems.append(f"host {host} failed ten times")

    def _note(self, done: dict[str, Any]) -> None:
        if "loss" not in done:
            return
        step, loss = done["step"], done["loss"]
        if step in self.losses:
            self.repeated.append(step)
            if self.losses[step] != loss:
                self.problems.append(f"step {step} had {self.losses[step]}, and then {loss}")
        self.losses[step] = loss

    def ranks(self, mark: str) -> list[int]:
        """The processes of the ranks."""
        found = {}
        for pid, environment in processes_with(mark).items():
            for rank in range(2):
                has_rank = f"\0RANK={rank}\0".encode() in environment
                is_rank = b"penstock\0train" in Path(f"/proc/{pid}/cmdline").read_bytes()
                if has_rank and is_rank:
                    found[rank] = min(pid, found.get(rank, pid))
        return [found[rank] for rank in sorted(found)]


def strike(soak: Soak, hosts: Hosts, kind: str, rank: int, mark: str) -> Struck:
    """Let a fault happen now; return when the training was back, and what it had lost."""
    began_s, before = time.monotonic(), len(soak.repeated)
    last = max(soak.losses)
    if kind == "cut":
        hosts.cut(1)
        time.sleep(CUT_S)
        hosts.mend(1)
    else:
        pid = soak.ranks(mark)[rank]
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        last = max(soak.losses)
    # A step may still have been under way when the fault came.
    if not until(lambda: max(soak.losses) > last + 2 or not soak.is_running, STALLED_S):
        soak.problems.append(f"{kind} at step {last}: not back after {STALLED_S:g} s")
    lost = len(soak.repeated) - before
    return Struck(kind, rank, last, lost, time.monotonic() - began_s)


def undisturbed(num_steps: int) -> dict[int, float]:
    """Return the losses of the same training on one host, without faults."""
    options = [*MODEL, f"--steps={num_steps}", "--json"]
    printed = subprocess.run(
        [*PENSTOCK, *options], stdout=subprocess.PIPE, text=True, check=True, timeout=3600
    ).stdout
    steps = [json.loads(line) for line in printed.splitlines()]
    return {done["step"]: done["loss"] for done in steps if "loss" in done}


def run(num_steps: int, kinds: Sequence[str]) -> tuple[Soak, list[Struck]]:
    """Train with faults at random steps; return what was reported."""
    moments = sorted(random.sample(range(num_steps // 20, num_steps * 9 // 10), len(kinds)))
    struck: list[Struck] = []
    with (
        Hosts(2) as hosts,
        tempfile.TemporaryDirectory() as folder,
        marked() as (mark, environment),
    ):
        soak = Soak(hosts, Path(folder), num_steps, environment)
        soak.start()
        for kind, moment in zip(kinds, moments, strict=True):
            while len(soak.losses) < moment and soak.is_running:
                time.sleep(random.uniform(0.01, 0.05))
            struck.append(strike(soak, hosts, kind, random.randrange(2), mark))
            print(struck[-1], file=sys.stderr)
        while soak.is_running and len(soak.losses) < num_steps:
            time.sleep(0.5)
        soak.join()
        if not until(lambda: not processes_with(mark), ENDING_S):
            soak.problems.append(f"processes {sorted(processes_with(mark))} are left")
        if soak.problems:
            for path in sorted(Path(folder).glob("errors *")):
                print(f"{path.name}: {path.read_text()[-2000:]}", file=sys.stderr)
    return soak, struck


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--faults", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    random.seed(args.seed)
    kinds = [FAULTS[number % len(FAULTS)] for number in range(args.faults)]
    random.shuffle(kinds)
    soak, struck = run(args.steps, kinds)
    expected = undisturbed(args.steps)
    wrong = [step for step, loss in expected.items() if soak.losses.get(step) != loss]
    table = Table("fault", "rank", "in step", "steps done again", "back after")
    for one in struck:
        table.add_row(
            one.kind, str(one.rank), str(one.step), str(one.lost_steps), f"{one.back_after_s:.1f} s"
        )
    Console(width=100).print(table)
    back = statistics.median(one.back_after_s for one in struck)
    print(f"{len(expected) - len(wrong)} of {len(expected)} losses are equal to the last bit")
    print(f"{len(soak.repeated)} steps were done again; back after {back:.1f} s (median)")
    for problem in soak.problems:
        print(problem)
    sys.exit(bool(wrong or soak.problems))


if __name__ == "__main__":
    main()

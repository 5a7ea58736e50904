"""How often does a message over gloo put a thread to sleep, and how many system calls does it take?

Two ranks run steps of small stages by torch, by Penstock over gloo, and over shared memory. Beside
them the same tensors go back and forth over gloo alone. Nothing is timed.

wake_ups.py                   voluntary context switches of all threads, as Linux counts them
wake_ups.py --system-calls    system calls that wait, send or receive, as strace counts them
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import PENSTOCK, PENSTOCK_GLOO, TORCH, Contender
from processes import run_ranks

MICROBATCHES, TOKENS, WIDTH = 8, 16, 64
BARE = Contender("gloo alone", "-")
CONTENDERS = [
    BARE,
    *(
        Contender(library, name)
        for name in ("1F1B", "GPipe")
        for library in (TORCH, PENSTOCK_GLOO, PENSTOCK)
    ),
]
CALLS = ("epoll_wait", "futex", "poll", "recvfrom", "recvmsg", "sendmsg", "sendto", "writev")
"""The system calls that move messages and wait for them; others are mostly those of a start."""
WARM_UP = 5
TIMEOUT_S = 120.0


def count_switches() -> int:
    """Count how often the threads of this process have gone to sleep."""
    found = 0
    for status in Path("/proc/self/task").glob("*/status"):
        line = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(), re.MULTILINE)
        found += int(line[1]) if line else 0
    return found


def run(contender: Contender, steps: int) -> int:
    """Take the steps on both ranks; return the switches of both, without those of first steps."""
    step = _bare_step() if contender == BARE else _pipeline_step(contender)
    with contenders.chosen_link(contender):
        for _ in range(WARM_UP):
            step()
    dist.barrier()
    before = count_switches()
    for _ in range(steps):
        step()
    counts: list[int] = [0, 0]
    dist.all_gather_object(counts, count_switches() - before)
    return sum(counts)


def _pipeline_step(contender: Contender):  # type: ignore[no-untyped-def]
    entrant = contenders.enter(
        contender,
        MICROBATCHES,
        lambda stage, count: nn.Linear(WIDTH, WIDTH),
        nn.functional.mse_loss,
    )
    assert entrant is not None
    x = torch.randn(MICROBATCHES, TOKENS, WIDTH)
    return lambda: entrant.step(x, x)


def _bare_step():  # type: ignore[no-untyped-def]
    """One tensor to the other rank and one back, for each microbatch, without computing."""
    group, other = dist.group.WORLD, 1 - dist.get_rank()
    assert group is not None
    tensor = torch.zeros(1, TOKENS, WIDTH)

    def step() -> None:
        for _ in range(MICROBATCHES):
            works = [
                group.send([tensor], other, 7),
                group.recv([torch.empty_like(tensor)], other, 7),
            ]
            for work in works if other else reversed(works):
                work.wait()

    return step


def count_system_calls(contender: Contender, steps: int) -> float:
    """Return the system calls of a step: two runs differ in their number of steps alone."""
    totals = []
    for number in (steps, 3 * steps):
        with tempfile.NamedTemporaryFile() as file:
            command = ["strace", "-f", "-c", "-o", file.name, sys.executable, __file__]
            command += ["--only", *contender, "--steps", str(number)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3 * TIMEOUT_S)
            rows = [line.split() for line in Path(file.name).read_text().splitlines()]
            # % time, seconds, microseconds per call, calls, sometimes errors, name
            totals.append(sum(int(row[3]) for row in rows if row and row[-1] in CALLS))
    return (totals[1] - totals[0]) / (2 * steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--system-calls", action="store_true")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.system_calls and shutil.which("strace") is None:
        sys.exit("strace is needed to count system calls. Install it (Debian: strace).")
    num_messages = 2 * MICROBATCHES
    for contender in [Contender(*options.only)] if options.only else CONTENDERS:
        if options.system_calls:
            per_step = count_system_calls(contender, options.steps)
        else:
            found = run_ranks(run, 2, contender, options.steps, timeout_s=TIMEOUT_S)
            per_step = found / options.steps
        print(f"{contender.library:20} {contender.schedule:6} {per_step / num_messages:6.1f}")


if __name__ == "__main__":
    main()

"""What does the host pay for each action of a step, if neither messages nor products take time?

One rank of a pipeline runs alone, in one process: torch's classes on its fake process group, ours
on channels that do nothing. Stages are single linear layers of width 4.

main.py time           seconds, interleaved, and the share of each kind of action
main.py instructions   instructions as callgrind counts them: the same on a busy machine
"""

import argparse
import ctypes
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

sys.path.append(str(Path(__file__).parents[1]))
from contenders import PENSTOCK, TORCH, TORCH_CLASSES, Contender, Entrant, quartiles
from host_time.lone_rank import WIDTH, Residual, enter_alone, fake_group
from processes import environment

import penstock
from penstock.ir.action import compute_parts
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.step import Step

RANKS, MICROBATCHES, RANK = 4, 8, 1
WARM_UP = 10
PLAIN = "plain"


def count_actions(name: str) -> int:
    schedule = penstock.schedules.get(name)(num_ranks=RANKS, num_microbatches=MICROBATCHES)
    return sum(len(compute_parts(action)) for action in schedule.orders[RANK])


def make_entrants() -> dict[tuple[str, str], Entrant]:
    return {
        (name, library): enter_alone(Contender(library, name), RANK, RANKS, MICROBATCHES)
        for name in TORCH_CLASSES
        for library in (TORCH, PENSTOCK)
    }


def plain_pass() -> Callable[[], None]:
    """Return a forward and a backward of a stage's module in plain autograd."""
    module, x, grad = Residual(), torch.ones(1, 1, WIDTH, requires_grad=True), torch.ones(1)

    def run() -> None:
        module(x).backward(grad.expand(1, 1, WIDTH))

    return run


class Kinds:
    """Seconds of each kind of action, without those of the kinds inside of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self._running: list[str] = []
        self._since = 0.0

    def watch(self, owner: Any, name: str, kind: Callable[..., str]) -> None:
        """Count calls of a function or method as a kind."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(kind(*args, **kwargs))
            self.counts[self._running[-1]] += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        setattr(owner, name, watched)

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def clear(self) -> None:
        self.seconds.clear()
        self.counts.clear()


def watch_torch(kinds: Kinds) -> None:
    base = torch_stage._PipelineStageBase
    kinds.watch(base, "forward_one_chunk", lambda *_, **__: "F")
    kinds.watch(base, "backward_weight_one_chunk", lambda *_, **__: "W")
    kinds.watch(
        base,
        "backward_one_chunk",
        lambda *_, full_backward=True, **__: "B" if full_backward else "I",
    )
    for name in ("_batch_p2p", "_wait_batch_p2p"):
        kinds.watch(torch_schedules, name, lambda *_, **__: "messages")
    for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
        kinds.watch(base, name, lambda *_, **__: "messages")


def watch_penstock(kinds: Kinds) -> None:
    def backward(step: Step, task: Any, *_: Any) -> str:
        return "I" if task.is_split else "B"

    kinds.watch(Step, "_forward", lambda *_: "F")
    kinds.watch(Step, "_backward", backward)
    kinds.watch(Step, "_backward_weight", lambda *_: "W")
    for name in ("send", "receive"):
        kinds.watch(Mailbox, name, lambda *_: "messages")


def take_times(rounds: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    x = torch.randn(MICROBATCHES, 1, WIDTH)
    with fake_group(RANK, RANKS):
        entrants = make_entrants()
        plain, plain_s = plain_pass(), list[float]()
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in entrants}
        for number in range(WARM_UP + rounds):
            if number == WARM_UP:
                gc.collect()
                gc.freeze()
            start_s = time.perf_counter()
            for _ in range(MICROBATCHES):
                plain()
            if number >= WARM_UP:
                plain_s.append((time.perf_counter() - start_s) / MICROBATCHES)
            for key, entrant in entrants.items():
                start_s = time.perf_counter()
                entrant.step(x, x)
                if number >= WARM_UP:
                    seconds[key].append(time.perf_counter() - start_s)
        kinds = take_kinds(entrants, x, rounds // 4)
    found = {}
    for name in TORCH_CLASSES:
        theirs, ours = seconds[name, TORCH], seconds[name, PENSTOCK]
        count = count_actions(name)
        found[name] = {
            "actions": count,
            "torch_us": [1e6 * value / count for value in quartiles(theirs)],
            "penstock_us": [1e6 * value / count for value in quartiles(ours)],
            "ratio": quartiles([a / b for a, b in zip(ours, theirs, strict=True)]),
            "kinds_us": {library: kinds[name, library] for library in (TORCH, PENSTOCK)},
        }
        print(name, json.dumps(found[name]), flush=True)
    plain_us = [1e6 * value for value in quartiles(plain_s)]
    print("a forward and a backward in plain autograd, us:", plain_us)
    return {"plain_us": plain_us, "schedules": found}


def take_kinds(
    entrants: dict[tuple[str, str], Entrant], x: Tensor, rounds: int
) -> dict[tuple[str, str], dict[str, float]]:
    """Return the microseconds of one action of each kind; watching them takes time itself."""
    kinds = Kinds()
    watch_torch(kinds)
    watch_penstock(kinds)
    found = {}
    for key, entrant in entrants.items():
        kinds.clear()
        start_s = time.perf_counter()
        for _ in range(rounds):
            entrant.step(x, x)
        total = time.perf_counter() - start_s
        each = {k: 1e6 * kinds.seconds[k] / n for k, n in kinds.counts.items() if k != "messages"}
        count = rounds * count_actions(key[0])
        each["messages, per action"] = 1e6 * kinds.seconds["messages"] / count
        each["the rest, per step"] = 1e6 * (total - sum(kinds.seconds.values())) / rounds
        found[key] = each
    return found


_MARKS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char *label) { CALLGRIND_DUMP_STATS_AT(label); }
"""


def count_instructions() -> dict[str, int]:
    """Run `run_counted` under callgrind; return the instructions of each step."""
    for tool in ("valgrind", "gcc"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is needed to count instructions. Install it (Debian: {tool}).")
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={folder}/out", sys.executable, __file__]
        subprocess.run(
            [*command, "counted", "--marks", make_marks(folder)],
            check=True,
            timeout=1200,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        found: dict[str, int] = {}
        for label, count in read_counts(folder):
            found[label] = min(count, found.get(label, count))
    return found


def make_marks(folder: str) -> str:
    """Compile the functions that tell callgrind what to count; return the path of the library."""
    (Path(folder) / "marks.c").write_text(_MARKS)
    marks = f"{folder}/marks.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", f"{folder}/marks.c", "-o", marks], check=True)
    return marks


def read_counts(folder: str) -> Iterator[tuple[str, int]]:
    """Yield the label and the instructions of each dump."""
    for file in Path(folder).glob("out.*"):
        lines = file.read_text(errors="ignore").splitlines()
        labels = [line for line in lines if line.startswith("desc: Trigger: Client Request: ")]
        totals = [line for line in lines if line.startswith(("totals:", "summary:"))]
        if labels and totals:
            yield labels[0].split(": ")[-1], int(totals[-1].split()[1])


def run_counted(marks_path: str) -> None:
    """Let callgrind write the instructions of each contender's step to a file of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    marks = ctypes.CDLL(marks_path)
    x = torch.randn(MICROBATCHES, 1, WIDTH)
    with fake_group(RANK, RANKS):
        entrants = make_entrants()
        plain = plain_pass()
        for _ in range(3):
            plain()
            for entrant in entrants.values():
                entrant.step(x, x)
        gc.collect()
        gc.freeze()
        gc.disable()
        marks.start()
        for _ in range(2):
            marks.zero()
            plain()
            marks.dump(PLAIN.encode())
            for (name, library), entrant in entrants.items():
                marks.zero()
                entrant.step(x, x)
                marks.dump(f"{name} {library}".encode())


def take_instructions() -> dict[str, Any]:
    counted = count_instructions()
    found: dict[str, Any] = {"plain": counted[PLAIN]}
    for name in TORCH_CLASSES:
        theirs, ours = (counted[f"{name} {library}"] for library in (TORCH, PENSTOCK))
        # What plain autograd takes for the same forwards and backwards.
        count = count_actions(name)
        schedule = penstock.schedules.get(name)(num_ranks=RANKS, num_microbatches=MICROBATCHES)
        plain = counted[PLAIN] * MICROBATCHES * len(schedule.placement.stages_of(RANK))
        found[name] = {
            "torch": theirs,
            "penstock": ours,
            "ratio": ours / theirs,
            "torch_own_per_action": (theirs - plain) / count,
            "penstock_own_per_action": (ours - plain) / count,
            "ratio_own": (ours - plain) / (theirs - plain),
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "experiments", nargs="*", default=["time", "instructions"], help="time, instructions"
    )
    parser.add_argument("--rounds", type=int, default=200, help="how often each step is timed")
    parser.add_argument("--marks", help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    if options.experiments == ["counted"]:
        run_counted(options.marks)
        return
    record: dict[str, Any] = {"environment": environment()}
    for name in options.experiments:
        record[name] = take_times(options.rounds) if name == "time" else take_instructions()
    if options.save:
        options.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

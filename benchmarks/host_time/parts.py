"""Where do the instructions of one step go, by part of the runtime?

Counts like `main.py instructions`, with a mark at the begin and end of each part. A mark itself
takes some 4,000 instructions, which are measured and subtracted.
"""

import ctypes
import gc
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from contenders import PENSTOCK, Contender
from host_time.lone_rank import WIDTH, Residual, enter_alone, fake_group
from host_time.main import MICROBATCHES, RANK, RANKS, count_actions, make_marks, read_counts

from penstock.backward import functions, input_half
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.step import Step
from penstock.stage.passage import SplitPassage, WholePassage

PARTS: dict[str, list[tuple[Any, str]]] = {
    "the module's forward": [(Residual, "forward")],
    "autograd's engine": [(functions, "run_backward"), (input_half, "run_backward")],
    "messages that arrive": [(Mailbox, "receive")],
    "messages that are sent": [(Mailbox, "send")],
    "around a stage's backward": [(WholePassage, "backward"), (SplitPassage, "backward")],
    "actions": [(Step, "_run"), (Step, "_send")],
}
REST, MARK = "once per step", "mark"


class Marks:
    """Lets callgrind write what was counted under the name of the part that is running."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.running = [REST]
        self.is_on = False

    def watch(self, part: str, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return original(*args, **kwargs)
            self.dump()
            self.running.append(part)
            try:
                return original(*args, **kwargs)
            finally:
                self.dump()
                self.running.pop()

        setattr(owner, name, watched)

    def dump(self) -> None:
        self.library.dump(self.running[-1].encode())


class Nothing:
    def run(self) -> None:
        pass


def run_counted(name: str, path: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    marks, x = Marks(path), torch.randn(MICROBATCHES, 1, WIDTH)
    for part, places in PARTS.items():
        for owner, function in places:
            marks.watch(part, owner, function)
    marks.watch(MARK, Nothing, "run")
    with fake_group(RANK, RANKS):
        entrant = enter_alone(Contender(PENSTOCK, name), RANK, RANKS, MICROBATCHES)
        for _ in range(3):
            entrant.step(x, x)
        gc.collect()
        gc.freeze()
        gc.disable()
        marks.library.start()
        marks.is_on = True
        marks.running = [MARK]
        marks.library.zero()
        for _ in range(20):
            Nothing().run()
        marks.running = [REST]
        marks.library.zero()
        entrant.step(x, x)
        marks.dump()


def main() -> None:
    if len(sys.argv) == 3:
        run_counted(*sys.argv[1:])
        return
    name = sys.argv[1] if len(sys.argv) > 1 else "1F1B"
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={folder}/out", sys.executable, __file__]
        subprocess.run(
            [*command, name, make_marks(folder)], check=True, timeout=1200, capture_output=True
        )
        found: dict[str, list[int]] = defaultdict(list)
        for label, count in read_counts(folder):
            found[label].append(count)
    # Marks around nothing take a little more than marks around something: parts come out small.
    mark = sum(found[MARK]) / len(found[MARK])
    for part in (*PARTS, REST):
        own = sum(found[part]) - mark * len(found[part])
        print(f"{part:28} {own / count_actions(name):10,.0f} per action")


if __name__ == "__main__":
    main()

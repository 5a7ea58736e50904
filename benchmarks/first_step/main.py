"""How long do connecting the ranks and their first step take, beside a later step?

Each run starts new processes. After a barrier, every rank makes its stages and its pipeline and
takes a step; later steps are timed likewise. Both libraries are imported before. Stages are
linear layers.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import PENSTOCK, PENSTOCK_GLOO, TORCH, Contender
from processes import environment, run_ranks

from penstock import Pipeline, PipelineStage  # noqa: F401  # So that importing them is not timed.

WIDTH = 256
NUM_LATER_STEPS = 20
ALLOWED_S = 0.5
TIMEOUT_S = 120

Result = TypeVar("Result")


class Times(NamedTuple):
    """Seconds from the first rank's start to the last rank's end."""

    first_s: float
    """Of connecting and the first step."""
    later_s: float
    """Of a later step, the median."""

    @property
    def allowed_s(self) -> float:
        """What the first may take: twice a later step, and half a second."""
        return 2 * self.later_s + ALLOWED_S


def take_steps(contender: Contender, num_microbatches: int) -> Times:
    """Connect this rank, and time its steps."""
    x, target = torch.randn(2, num_microbatches, WIDTH)

    def make_module(stage: int, count: int) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def first_step() -> contenders.Entrant:
        with contenders.chosen_link(contender):
            entrant = contenders.enter(
                contender, num_microbatches, make_module, nn.functional.mse_loss
            )
            if entrant is None:
                raise RuntimeError(f"{contender} takes no {num_microbatches} microbatches.")
            entrant.step(x, target)
        return entrant

    first_s, entrant = time_together(first_step)
    entrant.check_gradients()
    later_s = [time_together(lambda: entrant.step(x, target))[0] for _ in range(NUM_LATER_STEPS)]
    return Times(first_s, statistics.median(later_s))


def time_together(work: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds that the work took on all ranks together, and what it returned here."""
    dist.barrier()
    start_s = time.perf_counter()
    result = work()
    spans: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(spans, (start_s, time.perf_counter()))
    return max(end for _, end in spans) - min(start for start, _ in spans), result


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8, help="number of processes (default 8)")
    parser.add_argument("--microbatches", type=int, default=16, help="in a step (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    entered = contenders.list_contenders(["1F1B", "ZB-V"], (TORCH, PENSTOCK_GLOO, PENSTOCK))
    found: dict[Contender, list[Times]] = {contender: [] for contender in entered}
    for _ in range(args.rounds):
        for contender in entered:
            found[contender].append(
                run_ranks(take_steps, args.ranks, contender, args.microbatches, timeout_s=TIMEOUT_S)
            )
    print("| schedule | library | first step | a later step | first ÷ (2 x later + 0.5 s) |")
    print("|---|---|--:|--:|--:|")
    for (library, schedule), runs in found.items():
        columns = [
            ([run.first_s * 1e3 for run in runs], "{:.0f}", " ms"),
            ([run.later_s * 1e3 for run in runs], "{:.0f}", " ms"),
            ([run.first_s / run.allowed_s for run in runs], "{:.2f}", ""),
        ]
        cells = [show(values, form, unit) for values, form, unit in columns]
        print(f"| {schedule} | {library} | {' | '.join(cells)} |")
    if args.save:
        runs_of = {" ".join(contender): runs for contender, runs in found.items()}
        args.save.write_text(json.dumps({**environment(), "runs": runs_of}, indent=1) + "\n")


def show(values: list[float], form: str, unit: str) -> str:
    low, middle, high = (form.format(value) for value in contenders.quartiles(values))
    return f"{middle}{unit} [{low}-{high}]"


if __name__ == "__main__":
    main()

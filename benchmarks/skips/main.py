"""A value that skips over stages: is it better handed on by each, or sent past them directly?

Four ranks with timed stages. Stage 0 gives a value that only stage 3 uses. *None*: it does not.
*Handed on*: each stage takes the value and gives it on. *Direct*: `skips_out` and `skips_in`, as
`penstock.pipeline` cuts models.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import Contender, Entrant, Samples
from processes import environment, run_ranks
from timed_stages.main import Slow

import penstock

RANKS, WARM_UP, ROUNDS = 4, 2, 12
NONE, HANDED_ON, DIRECT = WAYS = "none", "handed on", "direct"
SCHEDULES = ("1F1B", "ZB-H1")
SIZES_KIB = (16, 256, 4096, 16384)
SECONDS = 0.02  # Of a forward, and of each half of a backward.


class SkipStage(nn.Module):
    """A timed stage; the first also makes a value of `size` numbers, and the last uses it."""

    def __init__(self, stage: int, way: str, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.is_last = stage == RANKS - 1
        self.value = nn.Parameter(torch.ones(size)) if stage == 0 and way != NONE else None

    def forward(self, *args: Tensor) -> Any:
        *values, x = args  # What skips stages comes first.
        if self.value is not None:
            values = [self.value * 1.0]
        y = Slow.apply(x, SECONDS, SECONDS) + Slow.apply(self.weight, 0.0, SECONDS)
        if self.is_last:
            return y + sum(value.mean() for value in values)
        return (y, *values)


class HandedOn(SkipStage):
    """The value is among what one stage gives to the next, and comes last there too."""

    def forward(self, *args: Tensor) -> Any:
        x, *values = args
        return super().forward(*values, x)


def enter(way: str, name: str, size: int, m: int) -> Entrant:
    rank = dist.get_rank()
    module = (HandedOn if way == HANDED_ON else SkipStage)(rank, way, size)
    schedule = contenders.make_schedule(name, RANKS, m)
    assert schedule is not None
    is_direct = way == DIRECT
    stage = penstock.PipelineStage(
        module,
        rank,
        RANKS,
        "cpu",
        skips_in={0: 1} if is_direct and rank == RANKS - 1 else None,
        skips_out={RANKS - 1: 1} if is_direct and rank == 0 else None,
    )
    pipeline = penstock.Pipeline(stage, schedule, loss_fn=nn.functional.mse_loss)
    return Entrant(Contender(way, name), [module], pipeline, rank == 0, rank == RANKS - 1)


def run_size(size: int, m: int, rounds: int) -> Samples:
    """What every rank runs."""
    entrants = [enter(way, name, size, m) for name in SCHEDULES for way in WAYS]
    x = torch.ones(m, 8, requires_grad=True)

    def take_sample(entrant: Entrant) -> contenders.Sample:
        return contenders.time_step(entrant, x, torch.zeros(m, 8))

    title = f"{size * 4 // 1024} KiB"
    return contenders.run_rounds(entrants, take_sample, title=title, warm_up=WARM_UP, rounds=rounds)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=8, help="in a step (default 8)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each size")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    rounds = args.rounds // (3 if args.quick else 1)
    table = Table(title=f"{RANKS} ranks, {args.microbatches} microbatches: ms for a step")
    for column in ("schedule", "value", *WAYS, "handed on ÷ none", "direct ÷ none"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    record: dict[str, Any] = {**environment(), "microbatches": args.microbatches}
    for kib in SIZES_KIB:
        work = run_size, RANKS, kib * 256, args.microbatches, rounds
        samples: Samples = run_ranks(*work, timeout_s=args.timeout)
        for name in SCHEDULES:
            times = {way: contenders.step_times(samples[Contender(way, name)]) for way in WAYS}
            middle = {way: statistics.median(times[way]) for way in WAYS}
            ratios = [f"{middle[way] / middle[NONE]:.3f}" for way in (HANDED_ON, DIRECT)]
            cells = [f"{middle[way] * 1e3:.1f}" for way in WAYS]
            table.add_row(name, f"{kib} KiB", *cells, *ratios)
            quartiles = {way: contenders.quartiles(times[way]) for way in WAYS}
            record[f"{name}, {kib} KiB"] = quartiles
    Console(width=110, highlight=False).print(table)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

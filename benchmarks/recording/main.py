"""What does it cost to record a step?

Two ranks, each on a core of its own, run the same stages by two pipelines in turn: one that records
and one that does not. The ratio is taken in each round, and its median is reported.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import PENSTOCK, Contender, Entrant, Samples
from processes import environment, run_ranks
from split_backward.model import Block

import penstock

RANKS, BLOCKS, MICROBATCHES, WARM_UP = 2, 8, 8, 5
RECORDED = "recorded"
SIZES = {64: (1, 16), 256: (2, 64)}  # By width: samples and tokens of a microbatch.
ROUNDS = {64: 300, 256: 60}
LIMIT = 1.02


def make_stage(width: int, count: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS // count)))


def enter(name: str, width: int) -> list[Entrant]:
    """The pipeline on this rank, and one over the same stages that records."""
    plain = contenders.enter(
        Contender(PENSTOCK, name),
        MICROBATCHES,
        lambda _, count: make_stage(width, count),
        nn.functional.mse_loss,
    )
    assert plain is not None
    recording = penstock.Pipeline(
        list(plain.pipeline.stages.values()),
        plain.pipeline.schedule,
        loss_fn=nn.functional.mse_loss,
        record=True,
    )
    return [plain, replace(plain, contender=Contender(RECORDED, name), pipeline=recording)]


def run(name: str, width: int, rounds: int) -> Samples:
    """What both ranks run."""
    torch.manual_seed(0)
    entrants = enter(name, width)
    batch, tokens = SIZES[width]
    x = torch.randn(MICROBATCHES * batch, tokens, width, requires_grad=True)
    target = torch.randn_like(x)
    return contenders.run_rounds(
        entrants,
        lambda entrant: contenders.time_step(entrant, x, target, lead_in=1),
        title=f"{name}, width {width}",
        warm_up=WARM_UP,
        rounds=rounds,
    )


def measure(name: str, width: int, args: argparse.Namespace) -> dict[str, Any]:
    rounds = args.rounds or ROUNDS[width] // (10 if args.quick else 1)
    samples = run_ranks(run, RANKS, name, width, rounds, timeout_s=args.timeout, pin_to_cores=True)
    plain, recorded = samples[Contender(PENSTOCK, name)], samples[Contender(RECORDED, name)]
    times = contenders.step_times(plain), contenders.step_times(recorded)
    cpu = [
        [sum(s.cpu_s for s in step) for step in zip(*ranks, strict=True)]
        for ranks in (plain, recorded)
    ]
    return {
        "schedule": name,
        "width": width,
        "rounds": rounds,
        "plain_s": statistics.median(times[0]),
        "recorded_s": statistics.median(times[1]),
        "time_ratio_quartiles": quartiles_of_ratio(*times),
        "processor_ratio_quartiles": quartiles_of_ratio(*cpu),
    }


def quartiles_of_ratio(plain: list[float], recorded: list[float]) -> tuple[float, float, float]:
    return contenders.quartiles([b / a for a, b in zip(plain, recorded, strict=True)])


def table_of(figures: list[dict[str, Any]]) -> Table:
    table = Table(title="Recorded ÷ not recorded, in each round: median \\[middle half]")
    for column in ("schedule", "width", "step, ms", f"time (≤ {LIMIT})", "processor time"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for found in figures:
        ratios = []
        for key in ("time_ratio_quartiles", "processor_ratio_quartiles"):
            low, middle, high = found[key]
            ratios.append(f"{middle:.3f} \\[{low:.3f}-{high:.3f}]")
        step = f"{found['plain_s'] * 1e3:.1f}"
        table.add_row(found["schedule"], str(found["width"]), step, *ratios)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="of each case (default: 300, 60)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each case")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    cases = [(name, width) for width in SIZES for name in ("1F1B", "ZB-V")]
    figures = [measure(name, width, args) for name, width in cases]
    Console(width=100, highlight=False).print(table_of(figures))
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps({**environment(), "cases": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()

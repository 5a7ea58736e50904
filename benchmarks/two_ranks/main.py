"""How fast is a step on two ranks that compute, and how much of it does the runtime itself take?

A transformer of 8 blocks, half on each rank, each rank on a core of its own. In each round every
contender runs one step; medians over the rounds are compared. Where blocks are small, a plain loop
of the same forwards and backwards tells how much processor time the runtime adds to each action.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import (
    PENSTOCK,
    SCHEDULES,
    TORCH,
    TORCH_CLASSES,
    Contender,
    Entrant,
    Sample,
    Samples,
)
from processes import environment, run_ranks
from split_backward.model import Block

import penstock

RANKS, BLOCKS, WARM_UP = 2, 8, 3
HOST_TIME_LIMIT = 0.5  # Ours ÷ torch's, per action.


@dataclass(frozen=True)
class Size:
    """A microbatch, how often to measure, and how often as fast as torch's best ours should be."""

    width: int
    batch: int
    tokens: int
    rounds: int
    goal: float
    tells_host_time: bool = False


SIZES = {
    64: Size(64, 1, 16, rounds=100, goal=1.10, tells_host_time=True),
    256: Size(256, 2, 64, rounds=20, goal=1.05),
    384: Size(384, 2, 64, rounds=12, goal=1.05),
}


def make_stage(width: int, stage: int, count: int) -> nn.Module:
    """The stage's share of the blocks; a block is the same in every contender."""
    per_stage = BLOCKS // count
    blocks = []
    for number in range(stage * per_stage, (stage + 1) * per_stage):
        torch.manual_seed(number)
        blocks.append(Block(width))
    return nn.Sequential(*blocks)


def time_plain_loop(entrant: Entrant, m: int, microbatch: Tensor) -> float:
    """Processor seconds of the same forwards and backwards by autograd alone, the second time."""
    grad = torch.ones_like(microbatch)
    start_s = 0.0
    for _ in range(2):
        entrant.forget_gradients()
        start_s = time.process_time()
        for module in entrant.modules:
            for _ in range(m):
                x = microbatch.detach().requires_grad_()
                torch.autograd.backward(module(x), grad)
    return time.process_time() - start_s


def check_losses(entrants: list[Entrant], x: Tensor, target: Tensor) -> None:
    """Raise if contenders compute different losses."""
    expected: list[float] = []
    for entrant in entrants:
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, [loss.item() for loss in entrant.step(x, target)])
        found = max(everyone, key=len)  # Only the rank with the last stage has any.
        expected = expected or found
        if not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4):
            raise RuntimeError(f"{entrant.contender}: losses are {found}; expected {expected}.")


def run_size(size: Size, m: int, entered: list[Contender], rounds: int) -> Samples:
    """What both ranks run."""
    entrants = [
        entrant
        for contender in entered
        if (
            entrant := contenders.enter(
                contender,
                m,
                lambda stage, count: make_stage(size.width, stage, count),
                nn.functional.mse_loss,
            )
        )
    ]
    torch.manual_seed(BLOCKS)
    x = torch.randn(m * size.batch, size.tokens, size.width, requires_grad=True)
    target = torch.randn_like(x)
    check_losses(entrants, x, target)

    def take_sample(entrant: Entrant) -> Sample:
        sample = contenders.time_step(entrant, x, target, lead_in=1)
        if not size.tells_host_time:
            return sample
        return sample._replace(plain_cpu_s=time_plain_loop(entrant, m, x[: size.batch]))

    title = f"width {size.width}"
    return contenders.run_rounds(entrants, take_sample, title=title, warm_up=WARM_UP, rounds=rounds)


def host_times(contender: Contender, m: int, ranks: list[list[Sample]]) -> list[float]:
    """Seconds that the runtime adds to an action, in each round, over both ranks.

    Both libraries' are divided by the number of actions in Penstock's schedule of that name.
    """
    schedule = contenders.make_schedule(contender.schedule, RANKS, m)
    assert schedule is not None
    num_actions = contenders.count_actions(schedule)
    return [
        sum(sample.cpu_s - sample.plain_cpu_s for sample in step) / num_actions
        for step in zip(*ranks, strict=True)
    ]


Figures = dict[Contender, list[float]]


def cell(values: list[float] | None, unit: float) -> str:
    if values is None:
        return "-"
    low, middle, high = (value / unit for value in contenders.quartiles(values))
    digits = 1 if middle < 1000 else 0
    return f"{middle:.{digits}f} \\[{low:.{digits}f}-{high:.{digits}f}]"


def ratio_of(above: list[float] | None, below: list[float] | None) -> float | None:
    if above is None or below is None:
        return None
    return statistics.median(above) / statistics.median(below)


def marked(ratio: float | None, is_met: bool) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if is_met else f"[red]{ratio:.2f}[/]"


def best_of(steps: Figures, library: str) -> Contender | None:
    entered = [contender for contender in steps if contender.library == library]
    return min(entered, key=lambda contender: statistics.median(steps[contender]), default=None)


def step_table(size: Size, m: int, names: list[str], steps: Figures) -> Table:
    table = Table(title=f"Width {size.width}, {m} microbatches of {size.batch} x {size.tokens}")
    for column in ("schedule", "torch, ms \\[middle half]", "ours, ms", "torch ÷ ours"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name in names:
        theirs, ours = (steps.get(Contender(library, name)) for library in (TORCH, PENSTOCK))
        ratio = ratio_of(theirs, ours)
        cells = (cell(theirs, 1e-3), cell(ours, 1e-3), marked(ratio, True))
        table.add_row(name, *cells)
    best = [best_of(steps, library) for library in (TORCH, PENSTOCK)]
    values = [steps[who] if who else None for who in best]
    ratio = ratio_of(*values)
    cells = [
        f"{cell(value, 1e-3)} {who.schedule}" if who else "-"
        for who, value in zip(best, values, strict=True)
    ]
    table.add_section()
    is_met = ratio is None or ratio >= size.goal
    table.add_row("best of each", *cells, f"{marked(ratio, is_met)} (≥ {size.goal:.2f})")
    return table


def host_table(size: Size, names: list[str], hosts: Figures) -> Table:
    """Only schedules that both have."""
    table = Table(title=f"Host time per action, width {size.width}: step less plain loop")
    columns = ("schedule", "torch, µs \\[middle half]", "ours, µs")
    for column in (*columns, f"ours ÷ torch (≤ {HOST_TIME_LIMIT})"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name in names:
        theirs, ours = (hosts.get(Contender(library, name)) for library in (TORCH, PENSTOCK))
        ratio = ratio_of(ours, theirs)
        is_met = ratio is None or ratio <= HOST_TIME_LIMIT
        table.add_row(name, cell(theirs, 1e-6), cell(ours, 1e-6), marked(ratio, is_met))
    return table


def measure(size: Size, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run one width, print its tables; what is to be saved."""
    m, names = args.microbatches, args.names
    rounds = args.rounds or max(5, size.rounds // (5 if args.quick else 1))
    entered = contenders.list_contenders(names)
    samples: Samples = run_ranks(
        run_size, RANKS, size, m, entered, rounds, timeout_s=args.timeout, pin_to_cores=True
    )
    steps = {contender: contenders.step_times(ranks) for contender, ranks in samples.items()}
    console.print(step_table(size, m, names, steps))
    hosts: Figures = {}
    if size.tells_host_time:
        hosts = {who: host_times(who, m, ranks) for who, ranks in samples.items()}
        console.print(host_table(size, [name for name in names if name in TORCH_CLASSES], hosts))
    return {
        **asdict(size),
        "rounds": rounds,
        "step_s_quartiles": _quartiles(steps),
        "host_s_per_action_quartiles": _quartiles(hosts),
    }


def _quartiles(figures: Figures) -> dict[str, tuple[float, float, float]]:
    return {" ".join(who): contenders.quartiles(values) for who, values in figures.items()}


def parse_args() -> argparse.Namespace:
    widths = ",".join(map(str, SIZES))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--widths", default=widths, help=f"of: {widths} (default: all)")
    parser.add_argument("--microbatches", type=int, default=8, help="in a step (default 8)")
    parser.add_argument("--rounds", type=int, help="of each width (default: 100, 20, 12)")
    parser.add_argument("--quick", action="store_true", help="width 64, a fifth of the rounds")
    parser.add_argument("--only", metavar="NAME", action="append", help="this schedule; repeatable")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each width")
    parser.add_argument("--gloo", action="store_true", help="ours over gloo, as torch's is")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if unknown := [width for width in args.widths.split(",") if width not in widths.split(",")]:
        parser.error(f"--widths: unknown {', '.join(unknown)}; expected some of {widths}")
    args.sizes = [SIZES[int(width)] for width in args.widths.split(",")]
    args.names = [penstock.schedules.get(name).name for name in args.only or SCHEDULES]
    if args.quick:
        args.sizes = [SIZES[64]]
    return args


def main() -> None:
    args = parse_args()
    console = Console(width=110, highlight=False)
    if args.gloo:
        os.environ["PENSTOCK_SHARED_MEMORY"] = "0"
    records = [measure(size, args, console) for size in args.sizes]
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        record = {
            **environment(),
            "gloo": args.gloo,
            "microbatches": args.microbatches,
            "widths": records,
        }
        args.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

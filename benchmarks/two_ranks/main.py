"""How fast is a step on two ranks that compute, and how much of it does the runtime itself take?

A transformer of 8 blocks, half on each rank, each rank on a core of its own. Each schedule is run
by torch over gloo, by Penstock over gloo, and by Penstock over shared memory, its default. In each
round every contender runs one step. Where blocks are small, a plain loop of the same forwards and
backwards shows how much processor time the runtime adds to each action.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import (
    PENSTOCK,
    PENSTOCK_GLOO,
    SCHEDULES,
    TORCH,
    Contender,
    Entrant,
    Sample,
    Samples,
)
from processes import environment, run_ranks
from split_backward.model import Block
from two_ranks.tables import LIBRARIES, Quartiles, print_tables

import penstock
from penstock.comm.shared_memory import SharedMemoryLink

RANKS, BLOCKS, WARM_UP = 2, 8, 3


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
    64: Size(64, 1, 16, rounds=100, goal=1.50, tells_host_time=True),
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
    """Raise if contenders compute different losses, or not over the link that they stand for."""
    expected: list[float] = []
    for entrant in entrants:
        everyone: list[Any] = [None] * RANKS
        num_links = count_shared_memory_links()
        with contenders.chosen_link(entrant.contender):
            losses = entrant.step(x, target)
        uses_shared_memory = count_shared_memory_links() > num_links
        if uses_shared_memory != (entrant.contender.library == PENSTOCK):
            raise RuntimeError(f"{entrant.contender}: shared memory is {uses_shared_memory}.")
        dist.all_gather_object(everyone, [loss.item() for loss in losses])
        found = max(everyone, key=len)  # Only the rank with the last stage has any.
        expected = expected or found
        if not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4):
            raise RuntimeError(f"{entrant.contender}: losses are {found}; expected {expected}.")


def count_shared_memory_links() -> int:
    """Count those that are open in this process, whoever has them."""
    return sum(type(found) is SharedMemoryLink for found in gc.get_objects())


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


Figures = dict[str, list[float]]
"""For each contender, by its name, a figure per round."""


def quartiles_of(figures: Figures) -> dict[str, Quartiles]:
    return {name: contenders.quartiles(values) for name, values in figures.items()}


def ratios_of(above: Figures, below: Figures) -> dict[str, Quartiles]:
    """Divide the two of a schedule round by round: then a slow minute slows both."""
    return {
        name: contenders.quartiles([a / b for a, b in zip(above[name], values, strict=True)])
        for name, values in below.items()
        if name in above
    }


def summarise(figures: Figures) -> dict[str, Any]:
    """Quartiles of each contender, of torch ÷ ours, and which schedule of each library is best."""
    by_library = {
        library: {
            name: figures[key]
            for name in SCHEDULES
            if (key := key_of(Contender(library, name))) in figures
        }
        for library in LIBRARIES
    }
    best = {
        library: min(entered, key=lambda name: statistics.median(entered[name]))
        for library, entered in by_library.items()
        if entered
    }
    fastest = {library: {"best": by_library[library][name]} for library, name in best.items()}
    return {
        "quartiles": quartiles_of(figures),
        "best": best,
        "torch_over": {
            library: ratios_of(by_library[TORCH], by_library[library])
            | ratios_of(fastest.get(TORCH, {}), fastest.get(library, {}))
            for library in (PENSTOCK_GLOO, PENSTOCK)
        },
    }


def key_of(contender: Contender) -> str:
    return " ".join(contender)


def measure(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Run one width; returns what is printed and saved."""
    m = args.microbatches
    rounds = args.rounds or max(5, size.rounds // (5 if args.quick else 1))
    entered = contenders.list_contenders(args.names, LIBRARIES)
    samples: Samples = run_ranks(
        run_size, RANKS, size, m, entered, rounds, timeout_s=args.timeout, pin_to_cores=True
    )
    found = {
        **asdict(size),
        "rounds": rounds,
        "step_s": summarise({key_of(w): contenders.step_times(r) for w, r in samples.items()}),
    }
    if size.tells_host_time:
        hosts = {key_of(who): host_times(who, m, ranks) for who, ranks in samples.items()}
        found["host_s_per_action"] = summarise(hosts)
    return found


def parse_args() -> argparse.Namespace:
    widths = ",".join(map(str, SIZES))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--widths", default=widths, help=f"of: {widths} (default: all)")
    parser.add_argument("--microbatches", type=int, default=8, help="in a step (default 8)")
    parser.add_argument("--rounds", type=int, help="of each width (default: 100, 20, 12)")
    parser.add_argument("--quick", action="store_true", help="width 64, a fifth of the rounds")
    parser.add_argument("--only", metavar="NAME", action="append", help="this schedule; repeatable")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each width")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--tables", type=Path, help="print the tables of such a file, and end")
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
    if args.tables:
        print_tables(json.loads(args.tables.read_text()))
        return
    widths = [measure(size, args) for size in args.sizes]
    record = {**environment(), "microbatches": args.microbatches, "widths": widths}
    print_tables(record)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

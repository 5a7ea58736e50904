"""How long does a search take, how does that grow, and how good is what it finds?

Six experiments, all simulated, on one core. `published`: the bubbles of the zero-bubble paper,
what is found for the same costs and memory, and what no schedule can be better than. `v`: the same
in a V on more ranks, at the memory of 1F1B, with other costs too. `growth`:
uneven stages, more and more ranks and microbatches. `certify`: the small random problems of
`make fuzz`, whose best schedule the exact solver finds and proves. `recompute`: the costs of the
zero-bubble paper in half of the memory of 1F1B, with forwards recomputed in several ways. `units`:
equal times, in the memory of 1F1B with every forward recomputed.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "solver"))
from problems import random_problem
from processes import environment
from published_rows import V_ROW, read_rows, search_row
from recomputing import (
    UNIT_SIZES,
    InUnits,
    Recomputing,
    measure_in_units,
    measure_recomputing,
    recomputing_table,
    units_table,
)
from test_certify import gap_to_optimum

from penstock import CostTable, search

# Ranks, microbatches, and the seconds that were asked for, if any.
SIZES = [
    (4, 8, None),
    (8, 16, None),
    (8, 32, 2),
    (16, 32, None),
    (16, 64, 10),
    (32, 64, None),
    (32, 128, None),
    (32, 256, 60),
]

# Ranks and microbatches of `v`, and the times of F, I, W and messages.
V_SIZES = [(16, 32), (16, 48), (24, 72), (32, 96), (32, 128)]
V_TIMES = [
    (28.814, 28.760, 19.352, 1.610),
    (28.814, 28.760, 19.352, 0.5),
    (18.522, 18.086, 9.337, 0.601),
    (29.7, 33.0, 19.9, 0.53),
]


class Growth(NamedTuple):
    """One search of `growth`."""

    p: int
    m: int
    stages_per_rank: int
    memory: str
    seconds: float
    goal: int | None
    gap: float
    best_registered: float | None
    """The time of the best registered schedule that fits ÷ that of what was found."""


def uneven_costs(p: int, stages_per_rank: int) -> CostTable:
    """Times that differ by up to 60 % from stage to stage, and messages of 5 % of a forward."""
    generator = random.Random(1)
    count = p * stages_per_rank

    def each(time: float) -> list[float]:
        return [time * generator.uniform(0.8, 1.3) / stages_per_rank for _ in range(count)]

    return CostTable(
        forward=each(20),
        backward_input=each(20),
        backward_weight=each(12),
        after_forward=1 / stages_per_rank,
        after_input=0.5 / stages_per_rank,
        delay=1.0,
    )


def measure_growth(p: int, m: int, goal: int | None, stages_per_rank: int, times: int) -> Growth:
    costs = uneven_costs(p, stages_per_rank)
    found = search(costs, p, m, memory=times * p, seconds=600)
    registered = [tried.time for tried in found.tried if tried.fits and tried.count == 1]
    best = min(registered) / found.time if registered else None
    memory = f"{times}p"
    return Growth(p, m, stages_per_rank, memory, found.seconds, goal, found.gap, best)


def growth_table(rows: list[Growth]) -> Table:
    table = Table(title="Uneven stages: time to search (one core), gap to the bound")
    columns = ("ranks", "microbatches", "stages/rank", "memory", "s", "goal s", "gap", "registered")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        late = row.goal is not None and row.seconds > row.goal
        seconds = f"[{'red' if late else 'default'}]{row.seconds:.1f}[/]"
        table.add_row(
            *map(str, (row.p, row.m, row.stages_per_rank, row.memory)),
            seconds,
            "" if row.goal is None else str(row.goal),
            f"{row.gap:.2%}",
            "-" if row.best_registered is None else f"{row.best_registered:.3f}",
        )
    return table


class Published(NamedTuple):
    """One line of the published tables: bubble rates by span."""

    model: str
    m: int
    what: str
    published: float
    found: float
    bound: float
    seconds: float


def measure_published(line: dict[str, str]) -> list[Published]:
    p = int(line["p"])
    work = int(line["m"]) * sum(float(line[name]) for name in ("t_f", "t_i", "t_w"))
    rows = []
    for what, held, halves, published in (
        ("linear, 1p", p, False, float(line["zb_1p"])),
        ("linear, 2p", 2 * p, False, float(line["zb_2p"])),
        ("V, 1p", p, True, float(line["zb_1p"]) / 2),
    ):
        found = search_row(line, microbatches_held=held, halves=halves)
        bound = max(0.0, 1 - work / found.lower_bound)
        rows.append(
            Published(
                line["model"],
                int(line["m"]),
                what,
                published,
                found.report.bubble_by_span,
                bound,
                found.seconds,
            )
        )
    return rows


class InAV(NamedTuple):
    """One search of `v`: bubble rates by span."""

    p: int
    m: int
    times: tuple[float, ...]
    zb_v: float
    found: float
    bound: float
    seconds: float


def measure_v(p: int, m: int, times: tuple[float, ...]) -> InAV:
    names = ("t_f", "t_i", "t_w", "t_comm")
    row = {**V_ROW, "p": str(p), "m": str(m), **dict(zip(names, map(str, times), strict=True))}
    found = search_row(row, microbatches_held=p, halves=True)
    [zb_v] = [tried.time for tried in found.tried if tried.name == "ZB-V"]
    work = m * sum(times[:3])
    bubbles = [1 - work / time for time in (zb_v, found.time, found.lower_bound)]
    return InAV(p, m, times, *bubbles, found.seconds)


def v_table(rows: list[InAV]) -> Table:
    table = Table(title="V at the memory of 1F1B, bubble by span: ZB-V; ours; the bound")
    for column in ("ranks", "microbatches", "F, I, W, message", "ZB-V", "ours", "bound", "s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.p),
            str(row.m),
            ", ".join(map(str, row.times)),
            *(f"{bubble:.4f}" for bubble in (row.zb_v, row.found, row.bound)),
            f"{row.seconds:.1f}",
        )
    return table


def published_table(rows: list[Published]) -> Table:
    table = Table(title="8 ranks, bubble by span: ZB-1p, ZB-2p, half of ZB-1p; ours; the bound")
    for column in ("model", "microbatches", "memory", "published", "ours", "bound", "s"):
        table.add_column(column, justify="right")
    for row in rows:
        color = "red" if round(row.found, 4) > row.published else "default"
        table.add_row(
            row.model,
            str(row.m),
            row.what,
            f"{row.published:.4f}",
            f"[{color}]{row.found:.4f}[/]",
            f"{row.bound:.4f}",
            f"{row.seconds:.1f}",
        )
    return table


def certify(count: int) -> list[float]:
    """By which share the search is slower than the best schedule, for each problem."""
    gaps = []
    for seed in range(count):
        gaps.append(gap_to_optimum(random_problem(seed)))
        if gaps[-1] > 0 or seed % 20 == 19:
            print(f"problem {seed}: gap {gaps[-1]:.2%}", file=sys.stderr, flush=True)
    return gaps


def certify_lines(gaps: list[float]) -> str:
    optimal = sum(gap < 1e-9 for gap in gaps)
    return (
        f"{len(gaps)} random problems: the best schedule is found for {optimal}; "
        f"median gap {statistics.median(gaps):.2%}, worst {max(gaps):.2%}"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "experiment",
        nargs="?",
        choices=["growth", "published", "v", "certify", "recompute", "units"],
        help="only one",
    )
    parser.add_argument("--quick", action="store_true", help="the first sizes and lines only")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    console = Console(width=110, highlight=False)
    growth: list[Growth] = []
    published: list[Published] = []
    in_a_v: list[InAV] = []
    gaps: list[float] = []
    recomputing: list[Recomputing] = []
    in_units: list[InUnits] = []
    if args.experiment in (None, "published"):
        for line in read_rows()[: 1 if args.quick else None]:
            published += measure_published(line)
        console.print(published_table(published))
    if args.experiment in (None, "v"):
        for times in V_TIMES:
            for p, m in V_SIZES[: 2 if args.quick else None]:
                in_a_v.append(measure_v(p, m, times))
                print(in_a_v[-1], file=sys.stderr, flush=True)
        console.print(v_table(in_a_v))
    if args.experiment in (None, "growth"):
        for stages_per_rank in (1, 2):
            for p, m, goal in SIZES[: 2 if args.quick else None]:
                for times in (1, 2):
                    growth.append(measure_growth(p, m, goal, stages_per_rank, times))
                    print(growth[-1], file=sys.stderr, flush=True)
        console.print(growth_table(growth))
    if args.experiment in (None, "certify"):
        gaps = certify(5 if args.quick else 200)
        console.print(certify_lines(gaps))
    if args.experiment in (None, "recompute"):
        lines = [line for line in read_rows() if line["m"] == "24"][: 1 if args.quick else None]
        for line in lines:
            recomputing += [measure_recomputing(line, halves=halves) for halves in (False, True)]
        console.print(recomputing_table(recomputing))
    if args.experiment in (None, "units"):
        for p, m in UNIT_SIZES[: 2 if args.quick else None]:
            in_units.append(measure_in_units(p, m))
            print(in_units[-1], file=sys.stderr, flush=True)
        console.print(units_table(in_units))
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        record = {
            **environment(),
            "growth": [row._asdict() for row in growth],
            "published": [row._asdict() for row in published],
            "v": [row._asdict() for row in in_a_v],
            "certified_gaps": gaps,
            "recomputing": [row._asdict() for row in recomputing],
            "in_units": [row._asdict() for row in in_units],
        }
        args.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

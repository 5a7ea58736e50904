"""How many actions a second can be generated, verified and simulated, and how does that grow?

Sizes are run in turn, round after round, and the medians over the rounds are compared: ten times
the actions should take ten times as long. The largest runs once, in a process of its own, so that
its memory can be told; so does the part of one rank. The baseline is torch's own simulation of a
schedule's communication.
"""

import argparse
import gc
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import one_rank
from rich.console import Console
from rich.progress import track
from rich.table import Table

import penstock
from penstock.passes import add_comms

GROWTH_LIMIT = 1.1  # Time may grow by this factor more than the number of actions.
MILLION_LIMIT_S, MILLION_LIMIT_GIB = 30.0, 4.0
MILLION = (256, 2048)
ONE_RANK_LIMIT_S = 3.0


@dataclass(frozen=True)
class Size:
    """A schedule to make: which, and how large."""

    name: str
    p: int
    m: int

    def make(self) -> penstock.Schedule:
        generator = penstock.schedules.get(self.name)
        return generator(num_ranks=self.p, num_microbatches=self.m)


# Each is ten times the one before it, in m or in p.
GROWTHS = {
    "with m": [Size("1F1B", 16, 32), Size("1F1B", 16, 320), Size("1F1B", 16, 3200)],
    "with p": [Size("1F1B", 2, 256), Size("1F1B", 20, 256), Size("1F1B", 200, 256)],
    "with m, in a V": [Size("ZB-V", 8, 20), Size("ZB-V", 8, 200), Size("ZB-V", 8, 2000)],
}
AGAINST_TORCH = [Size("1F1B", 8, 32), Size("1F1B", 16, 128), Size("ZB-V", 8, 64)]


@dataclass(frozen=True)
class Times:
    """Seconds for each of the three things that can be done with a schedule."""

    generate_s: float
    verify_s: float
    simulate_s: float

    def per_action(self, num_actions: int) -> "Times":
        return Times(*(value / num_actions for value in asdict(self).values()))


def time_once(size: Size) -> Times:
    gc.collect()
    watch = [time.perf_counter()]
    schedule = size.make()
    list(schedule.orders)  # They are made when they are asked for.
    watch.append(time.perf_counter())
    schedule.verify()
    watch.append(time.perf_counter())
    penstock.simulate(schedule)  # Verifies once more, as it does for a user.
    watch.append(time.perf_counter())
    return Times(*(after - before for before, after in pairwise(watch)))


def median_of(samples: Iterable[Times]) -> Times:
    columns = zip(*(asdict(sample).values() for sample in samples), strict=True)
    return Times(*(statistics.median(column) for column in columns))


def measure_growth(rounds: int) -> dict[str, list[dict[str, object]]]:
    """For each growth: the sizes, their actions and the median times."""
    samples: dict[Size, list[Times]] = {size: [] for sizes in GROWTHS.values() for size in sizes}
    for round_number in track(range(rounds + 1), "growth", console=Console(stderr=True)):
        for size, kept in samples.items():
            sample = time_once(size)
            if round_number > 0:  # The first warms up.
                kept.append(sample)
    return {
        title: [
            {
                **asdict(size),
                "actions": size.make().num_actions,
                "median": asdict(median_of(samples[size])),
                "spread": _spread(samples[size]),
            }
            for size in sizes
        ]
        for title, sizes in GROWTHS.items()
    }


def _spread(samples: list[Times]) -> tuple[float, float]:
    """The fastest and the slowest simulation."""
    simulated = [sample.simulate_s for sample in samples]
    return min(simulated), max(simulated)


def measure_million() -> dict[str, float]:
    """The largest size, in a process of its own."""
    command = [sys.executable, __file__, "--million"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    found: dict[str, float] = json.loads(output.stdout)
    return found


def run_million() -> None:
    size = Size("1F1B", *MILLION)
    times = time_once(size)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    actions = size.make().num_actions
    print(json.dumps({**asdict(times), "actions": actions, "peak_gib": peak_gib}))


def measure_one_rank() -> list[dict]:
    """The first, middle and last rank of each algorithm, each in a process of its own."""
    found = []
    p, _ = one_rank.SIZE
    for name in track(penstock.schedules.names(), "one rank", console=Console(stderr=True)):
        for rank in (0, p // 2, p - 1):
            command = [sys.executable, one_rank.__file__, name, str(rank)]
            output = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=600
            )
            found.append(json.loads(output.stdout))
    return found


def one_rank_table(rows: list[dict]) -> Table:
    p, m = one_rank.SIZE
    table = Table(title=f"4 one rank's part, p={p}, m={m} (processor time)")
    columns = ("schedule", "rank", "actions", "verify", "program", "all", "process", "traced")
    for column in columns:
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in rows:
        table.add_row(
            row["name"],
            str(row["rank"]),
            f"{row['actions']:,}",
            f"{row['verify_s']:.2f} s",
            f"{row['program_s']:.2f} s",
            f"{total_s(row):.2f} s",
            f"{row['process_mib']:.0f} MiB",
            f"{row['traced_mib']:.0f} MiB",
        )
    return table


def total_s(row: dict) -> float:
    return row["construct_s"] + row["verify_s"] + row["program_s"]


def measure_against_torch(rounds: int) -> list[dict[str, object]]:
    """The same orders by all; torch needs sends and receives in them, and Penstock does not."""
    from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute

    found: list[dict[str, object]] = []
    for size in track(AGAINST_TORCH, "against torch", console=Console(stderr=True)):
        plain = size.make()
        with_comms = add_comms(plain)
        ranks = plain.placement.ranks
        theirs = {
            rank: [_Action.from_str(str(action)) for action in order]
            for rank, order in enumerate(with_comms.orders)
        }
        contenders: dict[str, Callable[[], object]] = {
            "torch": partial(_simulate_comms_compute, theirs, ranks.__getitem__, len(ranks)),
            "penstock": partial(penstock.simulate, plain),
            "penstock_with_comms": partial(penstock.simulate, with_comms),
        }
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for round_number in range(rounds + 1):
            for name, contender in contenders.items():
                gc.collect()
                start = time.perf_counter()
                contender()
                if round_number > 0:  # The first warms up.
                    samples[name].append(time.perf_counter() - start)
        medians = {f"{name}_s": statistics.median(times) for name, times in samples.items()}
        spreads = {f"{name}_spread": (min(times), max(times)) for name, times in samples.items()}
        found.append({**asdict(size), "actions": with_comms.num_actions, **medians, **spreads})
    return found


def find_growths(rows: list[dict]) -> list[tuple[float, float, float]]:
    """From each size to the next: how often the actions, the time to verify and to simulate."""
    return [
        (
            large["actions"] / small["actions"],
            large["median"]["verify_s"] / small["median"]["verify_s"],
            large["median"]["simulate_s"] / small["median"]["simulate_s"],
        )
        for small, large in pairwise(rows)
    ]


def growth_table(title: str, rows: list[dict]) -> Table:
    table = Table(title=f"1 growth {title}: per action, and from the row above")
    columns = (
        "schedule",
        "p",
        "m",
        "actions",
        "generate",
        "verify",
        "simulate",
        "fastest-slowest",
    )
    for column in (*columns, "actions, verify, simulate"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    growths = ["", *(", ".join(f"x{factor:.1f}" for factor in row) for row in find_growths(rows))]
    for row, growth in zip(rows, growths, strict=True):
        actions = row["actions"]
        per_action = asdict(Times(**row["median"]).per_action(actions)).values()
        fastest, slowest = (value / actions * 1e6 for value in row["spread"])
        table.add_row(
            row["name"],
            str(row["p"]),
            str(row["m"]),
            f"{actions:,}",
            *(f"{value * 1e6:.2f} µs" for value in per_action),
            f"{fastest:.2f}-{slowest:.2f}",
            growth,
        )
    return table


def find_excesses(
    growths: dict[str, list[dict]], million: dict[str, float], parts: list[dict]
) -> list[str]:
    """What is over its limit."""
    found = [
        f"growth {title}, to p={row['p']}, m={row['m']}: "
        f"x{max(times):.1f} time for x{actions:.1f} actions"
        for title, rows in growths.items()
        for row, (actions, *times) in zip(rows[1:], find_growths(rows), strict=True)
        if max(times) > actions * GROWTH_LIMIT
    ]
    total_s = sum(million[name] for name in ("generate_s", "verify_s", "simulate_s"))
    if total_s > MILLION_LIMIT_S:
        found.append(f"a million actions took {total_s:.1f} s")
    if million["peak_gib"] > MILLION_LIMIT_GIB:
        found.append(f"a million actions took {million['peak_gib']:.1f} GiB")
    found += [
        f"rank {row['rank']} of {row['name']} took {total_s(row):.1f} s"
        for row in parts
        if total_s(row) > ONE_RANK_LIMIT_S
    ]
    return found


def torch_table(rows: list[dict]) -> Table:
    table = Table(title="3 against torch's _simulate_comms_compute (÷ torch)")
    columns = ("schedule", "p", "m", "actions and messages", "torch", "penstock", "with messages")
    for column in columns:
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in rows:
        ours = [
            f"{row[key] * 1e3:.1f} ms ({row[key] / row['torch_s']:.2f})"
            for key in ("penstock_s", "penstock_with_comms_s")
        ]
        table.add_row(
            row["name"],
            str(row["p"]),
            str(row["m"]),
            f"{row['actions']:,}",
            f"{row['torch_s'] * 1e3:.1f} ms",
            *ours,
        )
    return table


def save(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures and their environment to a file, if one was asked for."""
    if path is None:
        return
    record = {
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
        **figures,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each size (default 7)")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--one-rank", action="store_true", help="only the parts of one rank")
    parser.add_argument("--million", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.million:
        run_million()
        return
    if args.one_rank:
        parts = measure_one_rank()
        Console(width=110).print(one_rank_table(parts))
        save(args.save, {"one_rank": parts})
        return
    million = measure_million()
    growths = measure_growth(args.rounds)
    against_torch = measure_against_torch(args.rounds)
    parts = measure_one_rank()

    console = Console(width=110)
    for title, rows in growths.items():
        console.print(growth_table(title, rows))
    p, m = MILLION
    console.print(
        f"2 1F1B, p={p}, m={m}, {million['actions']:,} actions: generated in "
        f"{million['generate_s']:.1f} s, verified in {million['verify_s']:.1f} s, simulated "
        f"(and verified) in {million['simulate_s']:.1f} s (limit for all {MILLION_LIMIT_S:.0f} s), "
        f"{million['peak_gib']:.2f} GiB (limit {MILLION_LIMIT_GIB:.0f})"
    )
    console.print(torch_table(against_torch))
    console.print(one_rank_table(parts))
    save(
        args.save,
        {
            "rounds": args.rounds,
            "growth": growths,
            "million": million,
            "against_torch": against_torch,
            "one_rank": parts,
        },
    )
    for excess in find_excesses(growths, million, parts):
        console.print(f"[red]over the limit: {excess}[/red]")


if __name__ == "__main__":
    main()

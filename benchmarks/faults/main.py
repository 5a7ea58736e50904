"""How soon is a dead rank named by all others, and is anything left behind?

Four ranks on three hosts, which are network namespaces of this machine, train small steps. One of
them is killed, stopped or cut off, at a random moment in each kind of place.
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]
from faulty_ranks import FAULTS, PLACES, Fault, strike, until
from network_hosts import Hosts, missing

LAYOUT = [0, 1, 1, 2]  # The host of each rank.
LIMIT_S = 10.0
ENDING_S = 5.0


def run(hosts: Hosts, fault: Fault, seed: int) -> tuple[list[float], list[str]]:
    """Return how soon each other rank named a dead one, and what was wrong or left behind."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            named = strike(hosts, LAYOUT, fault, Path(folder), seed=seed)
        except (AssertionError, FileNotFoundError) as error:
            return [], [f"{fault}: {error}"]
    is_cut = fault.kind == "cut"
    expected = {rank for rank in range(len(LAYOUT)) if is_cut or rank != fault.victim}
    wrong = [f"{fault}: rank {rank} named nobody" for rank in sorted(expected - named.keys())]
    dead = {rank for rank, host in enumerate(LAYOUT) if host == LAYOUT[fault.victim]}
    dead = dead if is_cut else {fault.victim}
    for rank, (after_s, text) in named.items():
        names = [f"rank {rank}: rank {one} (" for one in dead]
        if after_s > LIMIT_S or (rank not in dead and not text.startswith(tuple(names))):
            wrong.append(f"{fault}: after {after_s:.1f} s, {text}")
    if not until(lambda: hosts.processes() == [], ENDING_S):
        wrong.append(f"{fault}: processes {hosts.processes()} are left")
    return [after_s for after_s, _ in named.values()], wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50, help="how often each fault (50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    args = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    random.seed(args.seed)
    table = Table("fault", "where", "times", "named within: median", "worst", "wrong, or left")
    problems = []
    with Hosts(3) as hosts:
        for kind in args.faults:
            found: dict[str, list[float]] = {place: [] for place in PLACES}
            counts = dict.fromkeys(PLACES, 0)
            before = len(problems)
            for number in range(args.times):
                place = PLACES[number % len(PLACES)]
                fault = Fault(kind, place, random.randrange(len(LAYOUT)), random.randrange(1, 4))
                times, wrong = run(hosts, fault, seed=random.randrange(2**31))
                found[place].append(max(times, default=float("inf")))
                counts[place] += 1
                problems += wrong
                print(f"{fault}: {found[place][-1]:.2f} s {' '.join(wrong)}", file=sys.stderr)
            every = [after_s for each in found.values() for after_s in each]
            rows = [(place, each) for place, each in found.items() if each]
            for place, each in [*rows, ("all", every)]:
                wrong_count = str(len(problems) - before) if place == "all" else ""
                middle, worst = statistics.median(each), max(each)
                count = len(every) if place == "all" else counts[place]
                table.add_row(
                    kind, place, str(count), f"{middle:.2f} s", f"{worst:.2f} s", wrong_count
                )
    Console(width=100).print(table)
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

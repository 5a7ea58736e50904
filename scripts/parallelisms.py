#!/usr/bin/env python3
"""Make the tables of docs/parallelisms.md: which wrappings train rightly.

    .venv/bin/python scripts/parallelisms.py                        # about an hour
    .venv/bin/python scripts/parallelisms.py schedules --rows TP    # one row of the first table

Each case trains three steps on two pipeline ranks and a mesh of replicas or shards, and compares
each gradient and weight with the whole model's. The first table is of plain blocks, by schedule.
Its cases are then run with the classes of torch.distributed.pipelining too, in processes of their
own, since some of them never end. The second table is of the other kinds of blocks, by wrapping.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from mesh_training import (  # noqa: E402  # after the path of the tests
    BLOCKS,
    SCHEDULES,
    WRAPPINGS,
    Case,
    Found,
    are_compatible,
    run_on_rank,
)
from torch_in_meshes import TORCH_CLASSES, run_torch_on_rank  # noqa: E402
from worker_pool import WorkerError, WorkerPool  # noqa: E402

PAGE = ROOT / "docs" / "parallelisms.md"
BEGIN, END = (
    "<!-- begin: scripts/parallelisms.py {} -->",
    "<!-- end: scripts/parallelisms.py {} -->",
)
# Full, split and overlapped backwards. `make fuzz` runs all schedules, which takes longer.
SCHEDULES_OF_KINDS = ["1F1B", "ZB-V", "DualPipeV"]
LARGEST_DIFFERENCE = 1e-12
TORCH_TIMEOUT_S = 30


def judge(found: list[Found]) -> str:
    worst = max(each.difference for each in found)
    if worst <= LARGEST_DIFFERENCE:
        return "ok"
    return "wrong"


def run_torch(case: Case) -> str:
    if case.schedule not in TORCH_CLASSES:
        return "-"
    pool = WorkerPool(num_workers=case.num_ranks)
    try:
        return judge(pool.run(case.num_ranks, run_torch_on_rank, case, timeout_s=TORCH_TIMEOUT_S))
    except WorkerError:  # An error, or no answer in time.
        return "fails"
    finally:
        pool.kill()


def run_ours(case: Case, pools: dict[int, WorkerPool]) -> str:
    try:
        return judge(pools[case.num_ranks].run(case.num_ranks, run_on_rank, case))
    except WorkerError as error:
        print(case, error, file=sys.stderr)
        return "fails"


def by_schedule(wrapping: str, pools: dict[int, WorkerPool]) -> list[str]:
    """Run the plain model in a wrapping by each schedule, with Penstock and with torch."""
    cases = [Case("plain", wrapping, schedule) for schedule in SCHEDULES]
    return [f"{run_ours(case, pools)} / {run_torch(case)}" for case in cases]


def by_wrapping(model: str, pools: dict[int, WorkerPool]) -> list[str]:
    """Run a kind of blocks in each wrapping, with Penstock; count the schedules that are right."""
    cells = []
    for wrapping in WRAPPINGS:
        cases = [Case(model, wrapping, schedule) for schedule in SCHEDULES_OF_KINDS]
        is_possible = are_compatible(model, wrapping)
        right = [run_ours(case, pools) for case in cases if is_possible].count("ok")
        cells.append(f"{right} of {len(cases)}" if is_possible else "-")
    return cells


class Table(NamedTuple):
    head: str
    columns: list[str]
    rows: list[str]
    make_row: Callable[[str, dict[int, WorkerPool]], list[str]]


TABLES = {
    "schedules": Table("Penstock / torch", SCHEDULES, list(WRAPPINGS), by_schedule),
    "kinds": Table("Penstock", list(WRAPPINGS), list(BLOCKS)[1:], by_wrapping),
}


def as_line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def renew(name: str, rows: list[str], pools: dict[int, WorkerPool]) -> None:
    """Make some rows of a table, and write it with the others as they are on the page."""
    table = TABLES[name]
    made = {}
    for row in table.rows:
        if not rows or row in rows:
            made[row] = as_line([row, *table.make_row(row, pools)])
            print(made[row], flush=True)
    begin, end = BEGIN.format(name), END.format(name)
    before, rest = PAGE.read_text().split(begin)
    old, after = rest.split(end)
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines()}
    lines = [as_line([table.head, *table.columns]), "|" + "---|" * (1 + len(table.columns))]
    lines += [made.get(row) or kept[row] for row in table.rows if row in made or row in kept]
    PAGE.write_text(before + "\n\n".join([begin, "\n".join(lines), end]) + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", choices=TABLES, help="both if not given")
    parser.add_argument("--rows", nargs="+", default=[], help="rows to make; all if not given")
    args = parser.parse_args()
    pools = {size: WorkerPool(num_workers=size) for size in (4, 8)}
    try:
        for name in [args.table] if args.table else TABLES:
            renew(name, args.rows, pools)
    finally:
        for pool in pools.values():
            pool.close()


if __name__ == "__main__":
    main()

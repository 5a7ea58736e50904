#!/usr/bin/env python3
"""Make the table of docs/parallelisms.md: which wrappings train rightly, by which schedule.

    .venv/bin/python scripts/parallelisms.py    # about half an hour

Each cell trains three steps on two pipeline ranks and a mesh of replicas or shards, and compares
each gradient and weight with the whole model's. The same cell is then run with the classes of
torch.distributed.pipelining, in processes of its own, since some of them never end.
"""

import argparse
import sys
from pathlib import Path

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
BEGIN, END = "<!-- begin: scripts/parallelisms.py -->", "<!-- end: scripts/parallelisms.py -->"
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


def beside_torch(pools: dict[int, WorkerPool]) -> list[str]:
    """Run the plain model in each wrapping by each schedule, with Penstock and with torch."""
    lines = ["| Penstock / torch | " + " | ".join(SCHEDULES) + " |"]
    lines.append("|---|" + "---|" * len(SCHEDULES))
    for wrapping in WRAPPINGS:
        cells = [wrapping]
        for schedule in SCHEDULES:
            case = Case("plain", wrapping, schedule)
            cells.append(f"{run_ours(case, pools)} / {run_torch(case)}")
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return lines


def by_model(pools: dict[int, WorkerPool]) -> list[str]:
    """Run all other models, with Penstock alone; count the schedules that were right."""
    lines = [f"| right, of {len(SCHEDULES)} schedules | " + " | ".join(WRAPPINGS) + " |"]
    lines.append("|---|" + "--:|" * len(WRAPPINGS))
    for model in BLOCKS:
        cells = [model]
        for wrapping in WRAPPINGS:
            cases = [Case(model, wrapping, schedule) for schedule in SCHEDULES]
            found = (
                [run_ours(case, pools) for case in cases] if are_compatible(model, wrapping) else []
            )
            cells.append(str(found.count("ok")) if found else "-")
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    pools = {size: WorkerPool(num_workers=size) for size in (4, 8)}
    try:
        tables = ["\n".join(make(pools)) for make in (beside_torch, by_model)]
    finally:
        for pool in pools.values():
            pool.close()
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text("\n".join([before + BEGIN, "", "\n\n".join(tables), "", END + after]))


if __name__ == "__main__":
    main()

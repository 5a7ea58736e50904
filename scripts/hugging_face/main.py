#!/usr/bin/env python3
"""Cut every model type of the transformers library in two, and compare its gradients.

    .venv/bin/python scripts/hugging_face/main.py run               # what is not known yet
    .venv/bin/python scripts/hugging_face/main.py run causal/opt    # one type, again
    .venv/bin/python scripts/hugging_face/main.py run uncut masked  # by result or category, again
    .venv/bin/python scripts/hugging_face/main.py show              # counts, and what failed
    .venv/bin/python scripts/hugging_face/main.py write             # the table in docs/cutting.md

A run takes about half an hour on two cores, and may be stopped at any time. Each type has a limit
in time, and runs in a process that is replaced if it does not come back.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from found_table import FOUND, load, make_table, write_page  # noqa: E402  # after the path

LIMIT_S = 240


class Worker:
    """A process that tries one type after the other."""

    def __init__(self, schedule: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, schedule), daemon=True)
        self._process.start()
        theirs.close()
        self.label = ""
        self._began = 0.0

    def give(self, category: str, kind: str, name: str) -> None:
        self.label, self._began = f"{category}/{kind}", time.monotonic()
        self._pipe.send((category, kind, name))

    def result(self) -> dict[str, Any] | None:
        """Return the result if there is one, or if there will be none."""
        if self._pipe.poll():
            try:
                found: dict[str, Any] = self._pipe.recv()
            except EOFError:
                return {"result": "crashed", "reason": "the process ended"}
            return found
        if time.monotonic() - self._began > LIMIT_S:
            return {"result": "crashed", "reason": f"no result after {LIMIT_S} s"}
        return None

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _work(pipe: Connection, schedule: str) -> None:
    import torch
    from try_type import try_type

    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    while True:
        category, kind, name = pipe.recv()
        pipe.send(try_type(category, kind, name, schedule))


def run(patterns: list[str], num_workers: int, schedule: str, path: Path) -> None:
    """Try the types, some at a time; keep what is known of the others."""
    import tiny_models
    import try_type  # noqa: F401  # Loaded once, for all workers.

    known = load(path)
    todo = []
    for category in tiny_models.CATEGORIES:
        for kind, name in tiny_models.types_of(category):
            label = f"{category}/{kind}"
            tags = {label, category, known.get(label, {}).get("result")}
            if not tags.isdisjoint(patterns) if patterns else label not in known:
                todo.append((category, kind, name))
    workers = [Worker(schedule) for _ in range(num_workers)]
    while todo or any(worker.label for worker in workers):
        for place, worker in enumerate(workers):
            if worker.label and (result := worker.result()) is not None:
                known[worker.label] = result
                path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
                reason = result.get("reason", "")[:150]
                print(worker.label, result["result"], result.get("way", ""), reason, flush=True)
                worker.label = ""
                if result["result"] == "crashed":
                    worker.stop()
                    workers[place] = Worker(schedule)
            elif not worker.label and todo:
                worker.give(*todo.pop(0))
        time.sleep(0.02)
    for worker in workers:
        worker.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "show", "write"])
    parser.add_argument("patterns", nargs="*", help="types, categories or results to try again")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--schedule", default="ZB-H1")
    parser.add_argument("--results", type=Path, default=FOUND)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.patterns, arguments.workers, arguments.schedule, arguments.results)
    elif arguments.command == "show":
        print(make_table(load(arguments.results)))
    else:
        write_page(load(arguments.results))

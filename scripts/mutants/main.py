"""Run the tests on mutants: copies of the source with one deliberate fault each.

    .venv/bin/python scripts/mutants/main.py                    # all lists
    .venv/bin/python scripts/mutants/main.py backward solver    # some of them
    .venv/bin/python scripts/mutants/main.py --only 3 backward  # one mutant, with pytest's output

Each file in `lists/` names mutants of one room, and the tests that should notice them. A mutant is
killed if those tests fail. Survivors are listed: they are faults that the suite would let through.
A run of all lists takes most of an hour on two cores, so this is not part of the suite.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "lists"
TIMEOUT_S = 900  # A mutant that hangs is noticed too: its tests fail at their own deadlines.


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in `file` below src/penstock, `old`, which is there once, becomes `new`."""

    room: str
    number: int
    file: str
    old: str
    new: str
    tests: str
    """What should fail: paths and options for pytest, as they are typed."""

    def plant(self, src: Path) -> str:
        """Change the copy of the source; returns the text as it was."""
        path = src / "penstock" / self.file
        text = path.read_text()
        if "src/" in self.tests:
            raise ValueError(f"{self.room}: tests in src/ are of the source itself, not of a copy")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.room} {self.number}: {self.old!r} is in {self.file} "
                f"{text.count(self.old)} times. Expected once: mend the list."
            )
        path.write_text(text.replace(self.old, self.new))
        return text


def read_list(room: str) -> list[Mutant]:
    """Read `lists/<room>.py`: MUTANTS as (file, old, new) or (file, old, new, tests), and TESTS."""
    spec = importlib.util.spec_from_file_location(room, LISTS / f"{room}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [
        Mutant(room, number, *fields[:3], fields[3] if len(fields) > 3 else module.TESTS)
        for number, fields in enumerate(module.MUTANTS)
    ]


def do_fail(tests: str, src: Path, *, is_shown: bool = False) -> bool:
    """Run tests on a copy of the source that nobody else uses, until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        ended = subprocess.run(
            [*command, *tests.split()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(src), "OMP_NUM_THREADS": "1"},
            capture_output=not is_shown,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    if ended.returncode not in (0, 1, 2):  # Passed, failed, or could not even be imported.
        raise ValueError(f"pytest {tests} ended with {ended.returncode}:\n{ended.stdout!r}")
    return ended.returncode != 0


def is_killed(mutant: Mutant, src: Path, *, is_shown: bool) -> bool:
    """Run the mutant's tests with the fault in place, and take it out again."""
    before = mutant.plant(src)
    try:
        return do_fail(mutant.tests, src, is_shown=is_shown)
    finally:
        (src / "penstock" / mutant.file).write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", help="lists to run; all of them by default")
    parser.add_argument("--only", type=int, help="the number of one mutant, to see its tests fail")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    parser.add_argument("--save", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    rooms = options.rooms or sorted(path.stem for path in LISTS.glob("*.py"))
    mutants = [mutant for room in rooms for mutant in read_list(room)]
    if options.only is not None:
        mutants = [mutant for mutant in mutants if mutant.number == options.only]
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copy = Path(folder) / str(number)
            shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
            copies.put(copy)

        def run(mutant: Mutant) -> tuple[Mutant, bool]:
            copy = copies.get()
            try:
                began_s = time.monotonic()
                killed = is_killed(mutant, copy, is_shown=options.only is not None)
                took_s = time.monotonic() - began_s
                word = "killed  " if killed else "SURVIVED"
                print(f"{word} {mutant.room} {mutant.number}  {took_s:5.1f} s", flush=True)
                return mutant, killed
            finally:
                copies.put(copy)

        for tests in sorted({mutant.tests for mutant in mutants}):
            if do_fail(tests, copy):
                sys.exit(f"pytest {tests} fails on the source as it is: mend that first")
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(run, mutants))
    for mutant, killed in results:
        if not killed:
            print(f"\n{mutant.room} {mutant.number}: {mutant.file}")
            print(f"- {mutant.old}\n+ {mutant.new}")
    num_killed = sum(killed for _, killed in results)
    print(f"\n{num_killed} of {len(results)} mutants killed")
    if options.save:
        table = {room: {} for room in rooms}
        for mutant, killed in results:
            table[mutant.room][mutant.number] = killed
        options.save.write_text(json.dumps(table, indent=1))
    sys.exit(num_killed < len(results))


if __name__ == "__main__":
    main()

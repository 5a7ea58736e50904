"""Choose which tests `make test` leaves out, so that the others take a given time.

    .venv/bin/pytest --durations=0 -vv tests/dist > durations.txt
    .venv/bin/python scripts/long_tests.py durations.txt=600 more.txt=900 > tests/long_tests.txt

Each file has recorded durations, and each number is the sum of those to keep. Every test function
may take up to a limit, the largest with which that sum is kept. Of a test with several cases, the
first ones within the limit are kept. So few tests are left out: those that take longest.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

# Rooms and files that stay whole, and tests of which at least the first case stays.
WHOLE = (
    "tests/backward/",
    "tests/ir/",
    "tests/schedules/",
    "tests/sim/",
    "tests/runtime/test_numerics.py",
    "tests/solver/test_bounds.py",
    "tests/test_layers.py",
)
FIRST = (
    "tests/test_readme.py::test_picture_of_the_schedules_is_what_is_drawn",
    "tests/test_import.py::test_source_does_not_import_torch_pipelining",
    "tests/test_docs.py::test_example_runs_and_prints_what_is_shown",
    "tests/test_examples.py::test_example_prints_its_golden_output",
    "tests/parallel/test_parallelize.py::test_training_equals_that_of_the_whole_model",
    "tests/parallel/test_training_state.py::test_training_goes_on_with_other_ranks",
    "tests/dist/test_meshes.py::test_stages_in_a_mesh_train_as_the_whole_model",
    "tests/dist/test_parallelize_on_processes.py::test_training_in_a_mesh_equals_that_of_the_whole_model",
    "tests/dist/test_failures.py::test_an_exception_on_one_rank_ends_all_and_says_where",
    "tests/hosts/test_dead_ranks.py::test_a_dead_rank_is_named_by_all_others",
    "tests/hosts/test_several_hosts.py::test_losses_on_several_hosts_are_those_of_one",
)
LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/\S+::[^\s\[]+)(\[.*)?$")


def read(path: Path) -> dict[str, list[float]]:
    """Return by test the seconds of its cases, as recorded; the order of cases is lost."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in path.read_text().splitlines():
        if match := LINE.match(line):
            seconds, name, case = match.groups()
            found[name][case or ""] += float(seconds)
    return {name: list(cases.values()) for name, cases in found.items()}


def kept(name: str, cases: list[float], limit: float) -> int:
    """Return how many cases of a test to keep: all of them take about the same time."""
    if name.startswith(WHOLE):
        return len(cases)
    mean = sum(cases) / len(cases)
    count = len(cases) if mean == 0 else min(len(cases), int(limit / mean))
    return max(count, 1) if name in FIRST else count


def total(tests: Mapping[str, list[float]], limit: float) -> float:
    """Return the seconds that are kept with a limit."""
    return sum(kept(name, cases, limit) * sum(cases) / len(cases) for name, cases in tests.items())


def main() -> None:
    print("# What `make test` leaves out, as it takes longest: all but this many first cases.")
    print("# Made by scripts/long_tests.py. `make test-all` runs all of them.")
    lines = []
    for argument in sys.argv[1:]:
        path, budget = argument.rsplit("=", 1)
        tests = read(Path(path))
        limits = sorted({sum(cases) for cases in tests.values()})
        limit = max((one for one in limits if total(tests, one) <= float(budget)), default=0.0)
        left_out = {
            name: kept(name, cases, limit)
            for name, cases in tests.items()
            if kept(name, cases, limit) < len(cases)
        }
        lines += [f"{name} {count}" for name, count in left_out.items()]
        counts = sum(map(len, tests.values())), sum(len(tests[n]) - k for n, k in left_out.items())
        print(f"{path}: limit {limit:.2f} s, {counts[1]} of {counts[0]} left out", file=sys.stderr)
    print(*sorted(lines), sep="\n")


if __name__ == "__main__":
    main()

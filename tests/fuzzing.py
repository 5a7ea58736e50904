"""How many cases and examples a test takes: some in `make test`, many in `make fuzz`."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from hypothesis import settings

IS_LONG = os.environ.get("PENSTOCK_FUZZ") == "1"
Test = TypeVar("Test", bound=Callable[..., Any])

only_in_fuzz = pytest.mark.fuzz(is_long=True)
"""Marks a test that only `make fuzz` runs; tests/conftest.py leaves it out elsewhere."""


def long_tests() -> dict[str, int]:
    """Return how many cases of each long test `make test` runs, by its name."""
    lines = (Path(__file__).parent / "long_tests.txt").read_text().splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {name: int(count) for name, count in pairs}


def beyond(counts: dict[str, int], items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests after the first cases of each, whose number `counts` says."""
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        if seen[name] > counts.get(name, inf):
            yield item


def examples(usual: int, *, long: int) -> "settings":
    """Decorates a hypothesis test that draws `usual` examples, the same each time, or `long` ones.

    A long run is there to find what the usual examples do not: it draws new ones.
    """
    from hypothesis import settings  # Late: the processes of tests/worker_pool.py need it not.

    return settings(
        max_examples=long if IS_LONG else usual,
        derandomize=not IS_LONG,
        print_blob=True,
    )


def rotated(
    num_cases: int = 0, **columns: Mapping[str, Any] | Iterable[Any]
) -> Callable[[Test], Test]:
    """Parametrise a test so that it takes each value of each column, but not every combination.

    There are as many cases as the longest column has values, or `num_cases`. A long run takes all
    combinations. A value that is to come more often may be in its column several times.
    """
    tables = [_keyed(column) for column in columns.values()]
    if IS_LONG:
        rows = list(dict(_row(chosen) for chosen in product(*tables)).items())
    else:
        num_rows = max(num_cases, *map(len, tables))
        rows = [
            _row([_turn(table, row, number) for number, table in enumerate(tables)])
            for row in range(num_rows)
        ]
    cases = [pytest.param(*values, id=key) for key, values in rows]

    def decorate(test: Test) -> Test:
        return pytest.mark.fuzz(pytest.mark.parametrize(list(columns), cases)(test))

    return decorate


def _keyed(column: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(column, Mapping):
        return list(column.items())
    return [(str(value), value) for value in column]


def _turn(table: list[tuple[str, Any]], row: int, number: int) -> tuple[str, Any]:
    """The value of a row: each time around a column begins with another, so that pairs differ."""
    return table[(row + number * (row // len(table))) % len(table)]


def _row(chosen: Iterable[tuple[str, Any]]) -> tuple[str, tuple[Any, ...]]:
    keys, values = zip(*chosen, strict=True)
    return "-".join(keys), values

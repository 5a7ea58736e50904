"""The drawings in the algorithms' files are what they make, and the docs leave none out."""

import importlib
import re
from pathlib import Path

import pytest

from penstock.schedules import REGISTRY, Generator

TABLE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


def cells_of(row: str) -> list[str]:
    """The cells of `rank 0  F0 .  B0`, from the first that is not idle."""
    cells = row.split()[2:]
    return cells[next(n for n, cell in enumerate(cells) if cell != ".") :]


@pytest.mark.parametrize("generator", REGISTRY, ids=lambda generator: generator.name)
def test_drawing_is_what_the_algorithm_makes(generator: Generator) -> None:
    drawing = importlib.import_module(generator.orders.__module__).__doc__ or ""
    [(p, m)] = re.findall(r"^ *p=(\d+), m=(\d+)", drawing, flags=re.MULTILINE)
    rows = re.findall(r"^ *(rank \d .*)$", drawing, flags=re.MULTILINE)
    made = str(generator(num_ranks=int(p), num_microbatches=int(m))).splitlines()
    assert int(p) == len(rows)
    for drawn, actual in zip(map(cells_of, rows), map(cells_of, made), strict=True):
        if re.fullmatch("[FBIW].*", drawn[0]):  # Where stage and rank are the same.
            actual = [re.sub(r"^\d+", "", cell) for cell in actual]
        if drawn[-1] == "…":
            drawn = drawn[:-1]
            actual = actual[: len(drawn)]
        assert drawn == actual


def test_table_in_the_docs_has_every_algorithm() -> None:
    assert [] == [each.name for each in REGISTRY if f"\n| {each.name} |" not in TABLE]

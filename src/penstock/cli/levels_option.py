"""The costs at memory levels that `--level` gives."""

from collections.abc import Sequence
from math import isnan
from typing import Annotated, TypeAlias

import typer

from penstock.cli.costs_option import load_costs
from penstock.costs import CostTable, Level
from penstock.costs.memory_levels import check_levels
from penstock.errors import OptionError

LevelTexts: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--level",
        metavar="LEVEL=FILE",
        help="Costs of the stages at a memory level, such as 0.5=half.json; give it once for each "
        "level, in place of a function.",
    ),
]


def read_levels(texts: Sequence[str]) -> dict[Level, CostTable]:
    """Return the costs in the files, by level."""
    pairs = [_split(text) for text in texts]
    levels = check_levels("--level", [level for level, _ in pairs])
    return {
        level: load_costs(path, None).costs for level, (_, path) in zip(levels, pairs, strict=True)
    }


def _split(text: str) -> tuple[Level, str]:
    level, mark, path = text.partition("=")
    if not (level.strip() and mark and path.strip()):
        raise OptionError(
            f"--level is {text!r}. Expected a level and a file of costs, such as 0.5=half.json."
        )
    try:
        number = float(level)
    except ValueError:
        return level.strip(), path.strip()
    return (level.strip() if isnan(number) else number), path.strip()

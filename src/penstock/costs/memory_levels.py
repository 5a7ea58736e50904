"""Memory levels: the same stages, measured with more or less recomputation.

At each level a stage has its own times and memory, such as those of one memory budget of
`penstock.compile`. Stages of one pipeline may have different levels, since what they send to each
other is the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, TypeAlias

from penstock.costs.cost_table import SCALES, STAGE_COSTS, CostTable
from penstock.errors import CostError

Level: TypeAlias = float | str
"""The name of a level: a number, such as a memory budget, or a text."""


def check_levels(name: str, levels: Any) -> list[Level]:
    """Return the levels as a list; raise an error unless each is a number or text of its own."""
    if isinstance(levels, str) or not isinstance(levels, Iterable):
        raise CostError(f"{name} is {levels!r}. Expected several levels: give a list.")
    each = list(levels)
    if not each:
        raise CostError(f"{name} is empty. Give at least one level, such as a memory budget.")
    for place, level in enumerate(each):
        # A nan does not equal itself.
        if not isinstance(level, int | float | str) or level != level:
            raise CostError(f"{name} holds {level!r}. Expected numbers or texts.")
        if level in each[:place]:
            raise CostError(f"{name} holds {level!r} twice. Give each level once.")
    return each


def check_tables(tables: Mapping[Level, CostTable]) -> None:
    """Raise an error unless the tables are of the same stages, with the same messages."""
    levels = check_levels("the mapping of levels", tables)
    for level, table in tables.items():
        if not isinstance(table, CostTable):
            raise CostError(f"The costs of level {level!r} are {table!r}. Expected a CostTable.")
    first = tables[levels[0]]
    for level in levels[1:]:
        table = tables[level]
        if table.num_stages != first.num_stages:
            raise CostError(
                f"The costs of level {level!r} are for {table.num_stages} stages, those of level "
                f"{levels[0]!r} for {first.num_stages}. Expected the same stages at each level."
            )
        if table.message_bytes != first.message_bytes:
            raise CostError(
                f"message_bytes of level {level!r} are {table.message_bytes}, those of level "
                f"{levels[0]!r} {first.message_bytes}. Expected equal ones: measure all levels "
                "with the same stages, placement and microbatches."
            )
        for name in SCALES:
            if getattr(table, name) != getattr(first, name):
                raise CostError(
                    f"{name} of level {level!r} is {getattr(table, name)}, that of level "
                    f"{levels[0]!r} {getattr(first, name)}. Expected the same microbatches at each "
                    "level."
                )


def mix_levels(tables: Mapping[Level, CostTable], levels: Sequence[Level]) -> CostTable:
    """Return the costs of stages with these levels, one for each stage.

    An edge between two levels has the longer delay and the smaller bandwidth of the two. Beside
    levels that say what dropped forwards hold, those that do not are taken to drop nothing.

    >>> tables = {1: CostTable.uniform(2, after_forward=4), 0.5: CostTable.uniform(2, forward=1.5)}
    >>> mix_levels(tables, [0.5, 1]).after_forward
    (1.0, 4.0)
    """
    chosen = [tables[level] for level in levels]
    edges = list(enumerate(pairwise(chosen)))
    of_stages = {
        name: [getattr(table, name)[stage] for stage, table in enumerate(chosen)]
        for name in STAGE_COSTS
    }
    if any(any(table.after_dropping) for table in chosen):
        for stage, table in enumerate(chosen):
            if not any(table.after_dropping):
                of_stages["after_dropping"][stage] = table.after_forward[stage]
                of_stages["during_dropping"][stage] = table.during_forward[stage]
                of_stages["during_recompute"][stage] = table.during_forward[stage]
    return CostTable(
        **of_stages,
        delay=[max(a.delay[edge], b.delay[edge]) for edge, (a, b) in edges],
        message_bytes=chosen[0].message_bytes,
        bandwidth=[min(a.bandwidth[edge], b.bandwidth[edge]) for edge, (a, b) in edges],
        overlap_saving=min(table.overlap_saving for table in chosen),
        time_scale=chosen[0].time_scale,
        memory_scale=chosen[0].memory_scale,
    )


def describe_levels(levels: Sequence[Level]) -> str:
    """Return the levels by stage, or the level that all stages have.

    >>> describe_levels([0.5, 0.5, 1])
    '0-1: 0.5, 2: 1'
    >>> describe_levels([0.5, 0.5])
    '0.5'
    """
    texts = [level if isinstance(level, str) else f"{level:.12g}" for level in levels]
    runs = [(text, [*run]) for text, run in groupby(range(len(texts)), lambda n: texts[n])]
    if len(runs) == 1:
        return texts[0]
    return ", ".join(
        f"{run[0]}-{run[-1]}: {text}" if len(run) > 1 else f"{run[0]}: {text}" for text, run in runs
    )

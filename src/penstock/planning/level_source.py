"""Stages whose memory levels are chosen: each keeps more activations, or computes more again.

A level may also say what recomputed forwards hold, so that levels differ in the parts of a stage
that are recomputed; the search then decides for which microbatches they are.

An early stage holds more microbatches than a late one, since their backwards come back later. So
memory is best saved on early stages: beside uniform levels, mixes are tried in which no stage has
a level of less memory than the stage before it. If there are few mixes in all, each is tried.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, product
from math import comb

from penstock.costs import CostTable, Level
from penstock.costs.memory_levels import check_tables, mix_levels
from penstock.ir import Placement
from penstock.passes.held_memory import ROUNDING
from penstock.planning.stage_sources import (
    AbstractSource,
    Choice,
    Refusal,
    Request,
    TableSource,
    choose_stages,
    least_memory,
)
from penstock.solver import Problem
from penstock.solver.problem_checks import check_recompute

_FEWEST_MIXES, _MOST_MIXES = 16, 256
_ACTIONS = 50_000  # The actions in all mixes; bounds for them take about a second.


class LevelSource(AbstractSource):
    """Stages that are already cut, with their costs at each level."""

    def __init__(
        self,
        tables: Mapping[Level, CostTable],
        mb_size: int,
        batch_size: int,
        request: Request,
    ) -> None:
        check_tables(tables)
        self._request = request
        self._sources = {
            level: TableSource(table, mb_size, batch_size, request)
            for level, table in tables.items()
        }
        self._first = next(iter(self._sources.values()))

    @property
    def batch_size(self) -> int:
        return self._first.batch_size

    @property
    def placements(self) -> list[Placement]:
        return self._first.placements

    def choices(self, num_microbatches: int, placement: Placement) -> list[Choice] | Refusal:
        tables = {level: source.costs(num_microbatches) for level, source in self._sources.items()}
        stages = range(placement.num_stages)
        lightest, least = _lightest(tables, placement)
        if least > self._request.memory * ROUNDING:
            return Refusal.for_memory(least, ())
        by_memory = sorted(
            tables,
            key=lambda level: (
                sum(_held_by_stage(tables[level])),
                sum(tables[level].after_forward),
            ),
        )
        most = _ACTIONS // (placement.num_stages * num_microbatches)
        mixes = _mixes(by_memory, len(stages), min(max(most, _FEWEST_MIXES), _MOST_MIXES))
        found = []
        for levels in dict.fromkeys([lightest, *mixes]):
            costs = mix_levels(tables, levels)
            if least_memory(costs, placement) <= self._request.memory * ROUNDING:
                found.append(
                    choose_stages(self._request, num_microbatches, placement, costs, levels)
                )
        return found


def _lightest(
    tables: Mapping[Level, CostTable], placement: Placement
) -> tuple[tuple[Level, ...], float]:
    """Return the levels by which one microbatch at a time fits in the least memory, and that.

    They are those with which it fits on each stage alone, or with which stages hold least while
    other stages of the rank run.
    """
    alone = {level: _least_by_stage(table) for level, table in tables.items()}
    waiting = {level: _held_by_stage(table) for level, table in tables.items()}
    found = [
        tuple(min(tables, key=lambda level: needed[level][s]) for s in range(placement.num_stages))
        for needed in (alone, waiting)
    ]
    least = {levels: least_memory(mix_levels(tables, levels), placement) for levels in found}
    return min(least.items(), key=lambda pair: pair[1])


def _least_by_stage(costs: CostTable) -> tuple[float, ...]:
    """Return the memory with which one microbatch at a time fits on each stage alone."""
    recompute = check_recompute("auto", costs)
    placement = Placement.linear(costs.num_stages)
    return Problem.of(costs, placement, 1, recompute=recompute).smallest_caps


def _held_by_stage(costs: CostTable) -> tuple[float, ...]:
    """Return what a microbatch holds on each stage, dropped where that is possible."""
    return costs.after_dropping if check_recompute("auto", costs) else costs.after_forward


def _mixes(levels: Sequence[Level], num_stages: int, most: int) -> Iterator[tuple[Level, ...]]:
    """Yield the levels of all stages in at most `most` ways, or with each level alone.

    `levels` are in the order of their memory, the least first. If the ways are too many for a
    level of each stage, neighbouring stages share one.
    """
    if len(levels) ** num_stages <= most:
        yield from product(levels, repeat=num_stages)
        return
    num_blocks = 1
    while num_blocks < num_stages and comb(num_blocks + len(levels), num_blocks + 1) <= most:
        num_blocks += 1
    for blocks in combinations_with_replacement(levels, num_blocks):
        yield tuple(blocks[stage * num_blocks // num_stages] for stage in range(num_stages))

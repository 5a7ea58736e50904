"""Plans that choose a memory level for each stage."""

from collections.abc import Mapping
from itertools import product
from math import inf
from random import Random
from typing import Any

import pytest

import penstock
from fuzzing import IS_LONG
from limits import HANG_S
from penstock import CostTable, Placement, Plan, simulate
from penstock.costs import Level
from penstock.costs.memory_levels import mix_levels
from penstock.errors import CostError, ScheduleError
from penstock.planning.level_source import _mixes
from penstock.solver import Problem, lower_bound
from penstock.solver.exact import solve


def make_levels(num_stages: int) -> dict[Level, CostTable]:
    """Each level keeps less than the one before it, and takes longer."""
    uniform = CostTable.uniform
    return {
        1.0: uniform(num_stages, after_forward=8.0, after_input=4.0),
        0.5: uniform(num_stages, backward_input=1.5, after_forward=4.0, after_input=4.0),
        0.0: uniform(num_stages, backward_input=2.0, after_forward=1.0, after_input=4.0),
    }


LEVELS = make_levels(4)
KEPT = LEVELS[1.0]


def plan(
    tables: CostTable | Mapping[Level, CostTable], num_microbatches: int = 8, **options: Any
) -> Plan:
    num_ranks = next(iter(tables.values())).num_stages if isinstance(tables, Mapping) else 4
    shape = {"batch": num_microbatches, "mb_size": 1, "microbatches": num_microbatches}
    return penstock.plan(tables, **{"num_ranks": num_ranks, "effort": 0.1, **shape, **options})


def random_levels(random: Random, num_stages: int, num_levels: int) -> dict[Level, CostTable]:
    """Uneven stages in whole numbers; each level keeps less than the one before, and is slower."""

    def each(low: int, high: int) -> list[int]:
        return [random.randint(low, high) for _ in range(num_stages)]

    forward, inputs, weights, kept = each(5, 20), each(5, 20), each(3, 20), each(6, 16)
    delay = each(0, 4)[1:]
    found: dict[Level, CostTable] = {}
    for level in range(num_levels):
        found[-level] = CostTable(
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            after_forward=kept,
            after_input=[random.randint(1, most + 4) for most in kept],
            delay=delay,
        )
        kept = [max(1, int(most * random.uniform(0.3, 0.9))) for most in kept]
        inputs = [time + more for time, more in zip(inputs, each(1, 6), strict=True)]
    return found


def solve_all(
    tables: Mapping[Level, CostTable], placement: Placement, num_microbatches: int, memory: float
) -> float:
    """The time of the best schedule for any level of any stage, proven by the exact solver."""
    bounds: list[tuple[float, CostTable]] = []
    for levels in product(tables, repeat=placement.num_stages):
        costs = mix_levels(tables, levels)
        problem = Problem.of(costs, placement, num_microbatches, memory=memory)
        if problem.find_shortage() is None:
            bounds.append((lower_bound(problem), costs))
    best = inf
    for bound, costs in sorted(bounds, key=lambda pair: pair[0]):
        if bound < best:
            exact = solve(costs, placement, num_microbatches, memory=memory, seconds=HANG_S)
            assert exact.is_optimal
            best = min(best, exact.report.makespan)
    return best


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(100 if IS_LONG else 5))
def test_small_plan_is_the_best_of_all_levels_of_all_stages(seed: int) -> None:
    random = Random(seed)
    placement = Placement.linear(random.randint(2, 3))
    num_microbatches = random.randint(2, 5)
    tables = random_levels(random, placement.num_stages, random.randint(2, 3))
    lightest = max(map(min, zip(*(t.after_forward for t in tables.values()), strict=True)))
    memory = random.uniform(lightest, max(tables[0].after_forward) * placement.num_ranks)
    best = plan(tables, num_microbatches, memory=memory, effort=1.0).best
    assert solve_all(tables, placement, num_microbatches, memory) == pytest.approx(
        best.time, rel=1e-9
    )
    assert max(best.memory) <= memory


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(60 if IS_LONG else 2))  # One and two stages per rank.
def test_plan_fits_and_is_never_slower_than_one_level_for_all(seed: int) -> None:
    random = Random(seed)
    num_ranks, stages_per_rank = random.choice([(3, 2), (6, 1), (12, 1)])
    tables = random_levels(random, num_ranks * stages_per_rank, 3)
    memory = random.uniform(1.2, num_ranks) * stages_per_rank * 16
    options = {"num_ranks": num_ranks, "memory": memory, "seconds": 10 * HANG_S, "effort": 0.02}
    found = plan(tables, 8, **options)
    assert found.is_complete
    for row in found.rows:
        assert row.costs == mix_levels(tables, row.levels)
        report = simulate(row.schedule, row.costs)
        assert report.makespan == row.time
        assert report.peak_memory <= memory
    for table in tables.values():
        assert found.best.time <= plan(table, 8, **options).best.time * (1 + 1e-12)


def test_fastest_level_wins_without_a_cap() -> None:
    best = plan(LEVELS).best
    assert (1.0,) * 4 == best.levels
    assert KEPT == best.costs
    assert plan(KEPT).best.time == best.time


# All 81 mixes of 4 stages are tried, but only some of the 729 of 6 stages.
@pytest.mark.parametrize("num_stages", [4, 6])
def test_mix_is_faster_than_each_level_and_saves_on_early_stages(num_stages: int) -> None:
    tables = make_levels(num_stages)
    options = {"num_ranks": num_stages, "memory": 4.0 * num_stages}
    best = plan(tables, **options).best
    assert best.time < min(plan(table, **options).best.time for table in tables.values())
    assert (0.5, 1.0) == (best.levels[0], best.levels[-1])
    assert sorted(best.levels, key=float) == [*best.levels]
    assert mix_levels(tables, best.levels) == best.costs
    assert max(best.memory) <= 4.0 * num_stages


@pytest.mark.parametrize("num_pairs", [1, 5])
def test_mix_fits_where_no_level_does_for_all_stages(num_pairs: int) -> None:
    times = {name: [1] * 2 * num_pairs for name in ("forward", "backward_input", "backward_weight")}
    crossed: dict[Level, CostTable] = {
        "even": CostTable(**times, after_forward=[2.0, 9.0] * num_pairs),
        "odd": CostTable(**times, after_forward=[9.0, 2.0] * num_pairs),
    }
    assert ("even", "odd") * num_pairs == plan(crossed, memory=2.0).best.levels
    message = "smallest found that fits is 2: with 8 microbatches of 1, linear"
    with pytest.raises(ScheduleError, match=message):
        plan(crossed, memory=1.9)


def test_one_level_is_planned_as_its_table() -> None:
    alone, table = plan({"all": KEPT}, memory=16.0), plan(KEPT, memory=16.0)
    assert table.best.schedule == alone.best.schedule
    assert (("all",) * 4, ()) == (alone.best.levels, table.best.levels)


def test_costs_of_each_level_scale_with_the_size_of_a_microbatch() -> None:
    options = {"batch": 8, "mb_size": 4, "microbatches": 4}
    best = penstock.plan(LEVELS, 4, **options, memory=16.0, effort=0.02).best
    assert [LEVELS[level].after_forward[0] / 2 for level in best.levels] == [
        *best.costs.after_forward
    ]


def test_tables_of_different_stages_are_refused() -> None:
    with pytest.raises(CostError, match=r"level 0.5 are for 2 stages, those of level 1.0 for 4"):
        plan({1.0: KEPT, 0.5: CostTable.uniform(2)})


def test_plan_shows_the_levels() -> None:
    found = plan(LEVELS, memory=16.0)
    lines = str(found).splitlines()
    assert ["placement", "schedule", "levels"] == lines[1].split()[-3:]
    shown = "0-1: 0.5, 2-3: 1"
    assert lines[2].endswith(f"  {shown}")
    assert repr(found.best).endswith(f", levels=({shown}))")
    assert "levels" not in str(plan(KEPT)) + repr(plan(KEPT))


def test_mixes_are_all_if_they_are_few() -> None:
    assert [*product("ab", repeat=3)] == [*_mixes("ab", 3, 8)]


@pytest.mark.parametrize(("num_stages", "most"), [(4, 8), (4, 15), (16, 30), (7, 3), (5, 1)])
def test_mixes_grow_along_the_stages_if_all_are_too_many(num_stages: int, most: int) -> None:
    found = [*_mixes("abc", num_stages, most)]
    assert len(found) == len(set(found)) <= max(most, 3)
    assert all([*levels] == sorted(levels) and len(levels) == num_stages for levels in found)
    assert {(level,) * num_stages for level in "abc"} <= set(found)


def recomputing(**options: float) -> CostTable:
    return CostTable.uniform(4, after_forward=10, after_input=4, **options)


HALF, WHOLE = recomputing(after_dropping=6, recompute=0.4), recomputing(after_dropping=1)


def test_levels_differ_in_the_part_that_is_recomputed() -> None:
    """The search decides which forwards are recomputed in each mix."""
    tables: dict[Level, CostTable] = {"half": HALF, "all": WHOLE}
    short = {"memory": 16, "effort": 0.02}
    best = plan(tables, **short).best
    alone = [plan({level: table}, **short).best.time for level, table in tables.items()]
    assert best.time < min(alone)
    assert {"half", "all"} == set(best.levels)
    assert any(best.recomputed)
    simulated = simulate(best.schedule, best.costs)
    assert best.time == pytest.approx(simulated.makespan)
    assert simulated.peak_memory <= 16


def test_lightest_mix_counts_what_recomputed_forwards_hold() -> None:
    """With several stages per rank, nothing fits unless some forwards are recomputed."""
    tables: dict[Level, CostTable] = {"half": HALF, "all": WHOLE}
    best = plan(tables, num_ranks=2, memory=13, effort=0.02).best
    assert "all" in best.levels
    assert any(best.recomputed)
    with pytest.raises(ScheduleError, match="The smallest found that fits is 16"):
        plan({"half": HALF}, num_ranks=2, memory=13)


def test_level_that_does_not_say_what_dropped_forwards_hold_drops_nothing() -> None:
    """Otherwise, nothing would be held at all after a forward of it."""
    mixed = mix_levels({"kept": recomputing(), "all": WHOLE}, ["kept", "all", "kept", "all"])
    assert (10, 1, 10, 1) == mixed.after_dropping
    alone = mix_levels({"kept": recomputing(), "all": WHOLE}, ["kept"] * 4)
    assert recomputing() == alone

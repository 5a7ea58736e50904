"""What recomputation costs by where it runs: in half of the memory of 1F1B, and in the least."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

sys.path.append(str(Path(__file__).parents[2] / "tests" / "solver"))
from published_rows import problem_of_row

from penstock import CostTable, Placement, schedules, search, simulate
from penstock.passes import add_recompute
from penstock.solver import Problem
from penstock.solver.registered_schedules import registered

UNIT_SIZES = [(p, times * p) for p in (4, 8, 16) for times in (2, 4, 8)]
"""Ranks and microbatches of the searches with unit costs."""


class Recomputing(NamedTuple):
    """Times ÷ the work of a rank without recomputation; None if nothing fits."""

    model: str
    m: int
    schedule: str
    plain: float
    """The best without recomputation."""
    inside: float | None
    """The schedule with all forwards recomputed inside of their backwards, as by checkpoints."""
    before: float | None
    """The same right before the backwards, also while they wait for gradients."""
    some: float | None
    """The same with no more of them than memory requires."""
    found: float
    """The best with recomputation."""
    bound: float
    seconds: float


def measure_recomputing(line: dict[str, str], *, halves: bool) -> Recomputing:
    """Compare for one line of the published tables; a dropped layer keeps its input."""
    p, m = int(line["p"]), int(line["m"])
    problem = problem_of_row(line, microbatches_held=p // 2, halves=halves)
    layer = 34 * int(line["hidden"]) + 5 * int(line["heads"]) * 1024
    share = 2 * int(line["hidden"]) / layer
    dropped = tuple(kept * share for kept in problem.costs.after_forward)
    costs = replace(problem.costs, after_dropping=dropped)
    shared = {"memory": problem.caps, "placements": [problem.placement]}
    plain = search(costs, p, m, **shared)
    found = search(costs, p, m, **shared, recompute=True, seconds=120)
    work = m * sum(float(line[name]) for name in ("t_f", "t_i", "t_w"))
    name = "ZB-V" if halves else "1F1B"

    def tried(kind: str) -> float | None:
        times = [one.time for one in found.tried if one.name == f"{name}, {kind}" and one.fits]
        return min(times) / work if times else None

    return Recomputing(
        line["model"],
        m,
        name,
        plain.time / work,
        _inside(name, replace(problem, costs=costs), work),
        tried("recomputed"),
        tried("partly recomputed"),
        found.time / work,
        found.lower_bound / work,
        found.seconds,
    )


def _inside(name: str, problem: Problem, work: float) -> float | None:
    """Return the time if backwards recompute what they need once their gradient is there."""
    costs = problem.costs
    missing = [a - b for a, b in zip(costs.after_forward, costs.after_dropping, strict=True)]

    def longer(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(a + b for a, b in zip(times, costs.recompute, strict=True))

    checkpointed = replace(
        costs,
        backward_input=longer(costs.backward_input),
        backward=longer(costs.backward),
        after_forward=costs.after_dropping,
        during_input=tuple(missing),
        during_backward=tuple(missing),
    )
    schedules = dict(registered(problem.placement, problem.num_microbatches))
    report = simulate(schedules[name], checkpointed)
    return report.makespan / work if problem.find_excess(report) is None else None


def recomputing_table(rows: list[Recomputing]) -> Table:
    table = Table(title="Half of the memory of 1F1B: time ÷ work, by where forwards are recomputed")
    columns = ("none", "in backwards", "before them", "some", "searched", "bound", "s")
    for column in ("model", "m", "schedule", *columns):
        table.add_column(column, justify="right")
    for row in rows:
        values = row[3:9]
        shown = ("-" if value is None else f"{value:.3f}" for value in values)
        table.add_row(row.model, str(row.m), row.schedule, *shown, f"{row.seconds:.0f}")
    return table


class InUnits(NamedTuple):
    """Times in those of a forward, all in the memory of 1F1B with every forward recomputed."""

    p: int
    m: int
    memory: float
    """In microbatches; without recomputation, 1F1B holds p."""
    kept: float
    """1F1B without recomputation, in more memory."""
    inside: float
    """1F1B with forwards recomputed inside of their backwards, as by checkpoints."""
    before: float
    """1F1B with forwards recomputed right before their backwards."""
    work: float
    """What a rank computes, if every forward runs twice."""
    found: float
    bound: float
    seconds: float


def measure_in_units(p: int, m: int) -> InUnits:
    """Search for the best placement of R for F = I = W = R = 1.

    A layer keeps 34 for its backward, 32 of it until W, and 2 if it is recomputed: its bytes per
    token and unit of width, without those of attention scores.
    """
    costs = CostTable.uniform(p, after_forward=34, after_input=32, after_dropping=2)
    kept = schedules.get("1F1B")(num_ranks=p, num_microbatches=m)
    before = simulate(add_recompute(kept), costs)
    found = search(
        costs,
        p,
        m,
        memory=before.peak_memory,
        placements=[Placement.linear(p)],
        recompute=True,
        seconds=60,
    )
    return InUnits(
        p,
        m,
        before.peak_memory / 34,
        simulate(kept, costs).makespan,
        simulate(kept, CostTable.uniform(p, backward_input=2)).makespan,
        before.makespan,
        4 * m,
        found.time,
        found.lower_bound,
        found.seconds,
    )


def units_table(rows: list[InUnits]) -> Table:
    table = Table(title="F = I = W = R = 1, in the memory of 1F1B with all recomputed")
    columns = ("memory", "kept", "in backwards", "before them", "work", "searched", "bound", "s")
    for column in ("ranks", "microbatches", *columns):
        table.add_column(column, justify="right")
    for row in rows:
        times = (f"{time:g}" for time in row[3:9])
        table.add_row(str(row.p), str(row.m), f"{row.memory:.2f}", *times, f"{row.seconds:.0f}")
    return table

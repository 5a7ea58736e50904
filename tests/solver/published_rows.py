"""The published bubbles of the zero-bubble paper, as questions to the search.

The tests compare with them, and benchmarks/search tells by how much.
"""

import csv
from pathlib import Path

from penstock import CostTable, Placement, SearchResult, search
from penstock.solver import Problem

TABLE = Path(__file__).parents[1] / "data" / "published_bubbles.csv"
V_ROW = {
    "p": "16",
    "m": "48",
    "hidden": "4096",
    "heads": "32",
    "t_f": "28.814",
    "t_i": "28.760",
    "t_w": "19.352",
    "t_comm": "1.610",
    "zb_v": ".0697",
}
"""A published bubble of ZB-V by span, at the memory of 1F1B."""


def read_rows() -> list[dict[str, str]]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def problem_of_row(row: dict[str, str], *, microbatches_held: int, halves: bool) -> Problem:
    """A line of the published tables, by span: one stage per rank, or two in a V."""
    p, hidden, heads = int(row["p"]), int(row["hidden"]), int(row["heads"])
    after_forward = 34 * hidden + 5 * heads * 1024
    costs = CostTable.uniform(
        2 * p if halves else p,
        stages_per_rank=2 if halves else 1,
        forward=float(row["t_f"]),
        backward_input=float(row["t_i"]),
        backward_weight=float(row["t_w"]),
        after_forward=after_forward,
        after_input=32 * hidden,
        delay=float(row["t_comm"]),
    )
    placement = Placement.v(p) if halves else Placement.linear(p)
    memory = microbatches_held * after_forward
    return Problem.of(costs, placement, int(row["m"]), memory=memory, clock="span")


def search_row(row: dict[str, str], *, microbatches_held: int, halves: bool) -> SearchResult:
    """The best that is found for a line of the published tables."""
    problem = problem_of_row(row, microbatches_held=microbatches_held, halves=halves)
    return search(
        problem.costs,
        problem.num_ranks,
        problem.num_microbatches,
        memory=problem.caps,
        placements=[problem.placement],
        clock=problem.clock,
    )

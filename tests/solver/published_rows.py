"""The published bubbles of the zero-bubble paper, as questions to the search.

The tests compare with them, and benchmarks/search tells by how much.
"""

import csv
from pathlib import Path

from penstock import CostTable, Placement, SearchResult, search

TABLE = Path(__file__).parents[1] / "data" / "published_bubbles.csv"


def read_rows() -> list[dict[str, str]]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def search_row(row: dict[str, str], *, microbatches_held: int, halves: bool) -> SearchResult:
    """The best by span for a line of the published tables, one stage per rank or two in a V."""
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
    return search(
        costs,
        p,
        int(row["m"]),
        memory=microbatches_held * after_forward,
        placements=[Placement.v(p) if halves else Placement.linear(p)],
        clock="span",
    )

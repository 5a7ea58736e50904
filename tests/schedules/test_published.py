"""The bubble rates that were published are reproduced to all four digits."""

import csv
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock import CostTable, schedules, simulate
from penstock.timeline import Report

TABLE = Path(__file__).parents[1] / "data" / "published_bubbles.csv"


class Row(NamedTuple):
    """One line of the published tables; times are those of a rank's whole share."""

    p: int
    m: int
    v: int
    times: dict[str, float]
    published: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.published['model']}-{self.m}"


def read_rows() -> list[Row]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return [
        Row(
            p=int(line["p"]),
            m=int(line["m"]),
            v=int(line["v"]),
            times={
                "forward": float(line["t_f"]),
                "backward_input": float(line["t_i"]),
                "backward_weight": float(line["t_w"]),
                "delay": float(line["t_comm"]),
            },
            published=line,
        )
        for line in csv.DictReader(lines)
    ]


ROWS = read_rows()


def simulate_row(name: str, row: Row, *, v: int = 1) -> Report:
    schedule = schedules.get(name)(num_ranks=row.p, num_microbatches=row.m, stages_per_rank=v)
    return simulate(schedule, CostTable.uniform(row.p * v, stages_per_rank=v, **row.times))


def four_digits(rate: float) -> str:
    return f"{rate:.4f}".removeprefix("0")


def test_table_has_all_six_rows() -> None:
    assert 6 == len(ROWS)


def published(column: str) -> dict[str, str]:
    return {row.name: row.published[column] for row in ROWS}


@pytest.mark.parametrize(("name", "column"), [("1F1B", "1f1b"), ("ZB-H1", "zb_h1")])
def test_bubble_by_makespan_is_the_published_one(name: str, column: str) -> None:
    found = {row.name: four_digits(simulate_row(name, row).bubble_by_makespan) for row in ROWS}
    assert published(column) == found


def test_zb_h2_bubble_by_span_is_the_published_one() -> None:
    found = {row.name: four_digits(simulate_row("ZB-H2", row).bubble_by_span) for row in ROWS}
    assert published("zb_h2") == found


def test_interleaved_ahead_bubble_by_makespan_is_the_published_one() -> None:
    reports = {row.name: simulate_row("InterleavedAhead", row, v=row.v) for row in ROWS}
    assert published("interleaved") == {
        name: four_digits(report.bubble_by_makespan) for name, report in reports.items()
    }


def test_megatrons_interleaved_order_takes_one_delay_per_rank_more_than_published() -> None:
    """The published figures are not of Interleaved1F1B, Megatron's order, but of another one."""
    for row in ROWS:
        ahead = simulate_row("InterleavedAhead", row, v=row.v)
        megatron = simulate_row("Interleaved1F1B", row, v=row.v)
        more = megatron.makespan - ahead.makespan
        assert row.p * row.times["delay"] == pytest.approx(more, abs=1e-9), row.name
        assert row.published["interleaved"] != four_digits(megatron.bubble_by_makespan), row.name

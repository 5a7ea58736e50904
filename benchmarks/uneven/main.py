"""What does a schedule that was searched for gain where stages differ, and is it as predicted?

Stages sleep for given times, so that more ranks than cores run side by side. On the real processes
costs are measured, schedules are searched for these costs, with and without a limit on memory, and
then they run against every registered schedule, of ours and of torch. In each round every contender
runs one step.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import PENSTOCK, SCHEDULES, Contender, Samples
from processes import environment, run_ranks
from timed_stages.main import WIDTH, TimedStage

import penstock
from penstock import CostTable, PipelineStage, Placement, Schedule


@dataclass(frozen=True)
class Case:
    """Microbatches, and milliseconds of F, I and W of each rank's share."""

    m: int
    ranks_ms: tuple[tuple[float, float, float], ...]

    @property
    def p(self) -> int:
        return len(self.ranks_ms)

    def stage_ms(self, stage: int, count: int) -> list[float]:
        """Times of a stage if the model is cut into `count`: each share in equal parts."""
        parts = count // self.p
        return [value / parts for value in self.ranks_ms[stage // parts]]

    def __str__(self) -> str:
        shares = ", ".join("/".join(f"{value:g}" for value in share) for share in self.ranks_ms)
        return f"{self.p} ranks, {self.m} microbatches, F/I/W {shares} ms"


CASES = [
    Case(12, ((20, 20, 14),) * 3 + ((34, 30, 24),)),
    Case(12, ((12, 12, 8), (20, 20, 14), (20, 20, 14), (30, 24, 24))),
]


# A registered schedule of each placement that holds little, whose memory a search is limited to.
LEAN = {"linear": "1F1B", "loop": "InterleavedZeroBubble", "V": "ZB-V"}


class Found(NamedTuple):
    """What was measured and searched for one placement, before the rounds."""

    costs: CostTable
    schedules: dict[str, Schedule]
    """By the name of the contender."""
    lower_bound: float
    seconds: float


class Outcome(NamedTuple):
    """What rank 0 brings home."""

    found: dict[str, Found]
    samples: Samples


def placements(p: int) -> dict[str, Placement]:
    return {
        "linear": Placement.linear(p),
        "loop": Placement.loop(p, stages_per_rank=2),
        "V": Placement.v(p),
    }


def find_schedules(case: Case, name: str, placement: Placement) -> Found:
    """Measure on all ranks, search on one."""
    count = placement.num_stages
    stages = [
        PipelineStage(TimedStage(case.stage_ms(stage, count)), stage, count, torch.device("cpu"))
        for stage in placement.stages_of(dist.get_rank())
    ]
    x = torch.randn(case.m, WIDTH, requires_grad=True)
    costs = penstock.measure_costs(
        stages,
        case.m,
        nn.functional.mse_loss,
        *((x,) if 0 in placement.stages_of(dist.get_rank()) else ()),
        target=torch.randn(case.m, WIDTH),
    )
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        shared = [search_schedules(case, name, placement, costs)]
    dist.broadcast_object_list(shared)
    found: Found = shared[0]
    return found


def search_schedules(case: Case, name: str, placement: Placement, costs: CostTable) -> Found:
    """The best with any memory, and within what each rank holds in a lean registered schedule."""
    lean = contenders.make_schedule(LEAN[name], case.p, case.m)
    assert lean is not None
    caps = [rank.peak_memory for rank in penstock.simulate(lean, costs).ranks]
    best = penstock.search(costs, case.p, case.m, placements=[placement])
    leanest = penstock.search(costs, case.p, case.m, placements=[placement], memory=caps)
    schedules = {
        f"searched, {name}": best.schedule,
        f"searched in the memory of {LEAN[name]}": leanest.schedule,
    }
    return Found(costs, schedules, best.lower_bound, best.seconds + leanest.seconds)


def run_case(case: Case, entered: list[Contender], warm_up: int, rounds: int) -> Outcome:
    """What every rank runs."""
    found = {name: find_schedules(case, name, where) for name, where in placements(case.p).items()}
    x = torch.randn(case.m, WIDTH, requires_grad=True)  # So that stage 0 has an I to do as well.
    target = torch.randn(case.m, WIDTH)
    searched = {
        Contender(PENSTOCK, name): schedule
        for one in found.values()
        for name, schedule in one.schedules.items()
    }
    entrants = []
    for contender in (*entered, *searched):
        entrant = contenders.enter(
            contender,
            case.m,
            lambda stage, count: TimedStage(case.stage_ms(stage, count)),
            nn.functional.mse_loss,
            schedule=searched.get(contender),
        )
        if entrant is not None:
            entrants.append(entrant)
    samples = contenders.run_rounds(
        entrants,
        lambda entrant: contenders.time_step(entrant, x, target),
        title=str(case),
        warm_up=warm_up,
        rounds=rounds,
    )
    return Outcome(found, samples)


class Row(NamedTuple):
    """A line of the table, in milliseconds: None where there is none."""

    name: str
    placement: str
    torch: float | None
    ours: float
    quartiles: tuple[float, float]
    """Of ours."""
    predicted: float
    bound: float
    memory: float
    """Microbatches that the fullest rank holds, counting a rank's whole share as 1."""

    @property
    def error(self) -> float:
        return self.predicted / self.ours - 1


def rows_of(case: Case, outcome: Outcome) -> list[Row]:
    times = {
        contender: [seconds * 1e3 for seconds in contenders.step_times(ranks)]
        for contender, ranks in outcome.samples.items()
    }
    medians = {contender: statistics.median(found) for contender, found in times.items()}
    searched = {
        name: schedule
        for found in outcome.found.values()
        for name, schedule in found.schedules.items()
    }
    names = {where.ranks: name for name, where in placements(case.p).items()}
    rows = []
    for library, name in medians:
        if library != PENSTOCK:
            continue
        schedule = searched.get(name) or contenders.make_schedule(name, case.p, case.m)
        assert schedule is not None
        where = names[schedule.placement.ranks]
        found = outcome.found[where]
        low, median, high = contenders.quartiles(times[Contender(PENSTOCK, name)])
        rows.append(
            Row(
                name,
                where,
                medians.get(Contender(contenders.TORCH, name)),
                median,
                (low, high),
                penstock.simulate(schedule, found.costs).makespan * 1e3,
                found.lower_bound * 1e3,
                penstock.simulate(schedule).peak_memory,
            )
        )
    return sorted(rows, key=lambda row: row.ours)


def case_table(case: Case, rows: list[Row]) -> Table:
    table = Table(title=f"{case}: median step in ms (lower is better)")
    columns = (
        "schedule",
        "placement",
        "torch",
        "ours",
        "quartiles",
        "predicted",
        "error",
        "bound",
        "memory",
    )
    for column in columns:
        justify = "left" if column in ("schedule", "placement") else "right"
        table.add_column(column, justify=justify)
    for row in rows:
        times = ["-" if row.torch is None else f"{row.torch:.0f}", f"{row.ours:.0f}"]
        color = "red" if abs(row.error) > 0.05 else "default"
        table.add_row(
            row.name,
            row.placement,
            *times,
            "{:.0f}-{:.0f}".format(*row.quartiles),
            f"{row.predicted:.0f}",
            f"[{color}]{row.error:+.1%}[/]",
            f"{row.bound:.0f}",
            f"{row.memory:g}",
        )
    return table


def summary(rows: list[Row]) -> list[str]:
    """The best searched schedule against the best fixed one, and the largest error."""
    lines = []
    for where in ("linear", "loop", "V"):
        own = [row for row in rows if row.placement == where]
        fixed = [row for row in own if not row.name.startswith("searched")]
        best = min(fixed, key=lambda row: row.ours)
        for searched in own:
            if searched not in fixed:
                lines.append(
                    f"{where:<8}{searched.name} {searched.ours:.0f} ms, best fixed "
                    f"{best.ours:.0f} ms ({best.name}): {best.ours / searched.ours:.3f} times as "
                    "fast"
                )
    worst = max(rows, key=lambda row: abs(row.error))
    return [*lines, f"largest error of prediction: {worst.error:+.1%} ({worst.name})", ""]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each case (default 7)")
    parser.add_argument("--quick", action="store_true", help="the first case, 2 rounds")
    parser.add_argument("--ours", action="store_true", help="leave torch out")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: expected at least 1")
    if args.quick:
        args.rounds = 2
    args.cases = CASES[:1] if args.quick else CASES
    return args


def main() -> None:
    args = parse_args()
    console = Console(width=110, highlight=False)
    records = []
    entered = contenders.list_contenders(SCHEDULES)
    if args.ours:
        entered = [contender for contender in entered if contender.library == PENSTOCK]
    for case in args.cases:
        outcome: Outcome = run_ranks(
            run_case, case.p, case, entered, 1, args.rounds, timeout_s=300 + 60 * args.rounds
        )
        rows = rows_of(case, outcome)
        console.print(case_table(case, rows), *summary(rows), sep="\n")
        records.append(
            {
                **asdict(case),
                "rows": [{**row._asdict(), "error": row.error} for row in rows],
                "searched": {
                    name: schedule.to_csv()
                    for found in outcome.found.values()
                    for name, schedule in found.schedules.items()
                },
            }
        )
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        record = {**environment(), "rounds": args.rounds, "cases": records}
        args.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

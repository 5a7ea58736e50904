"""How close does a pipeline come to the least time that its schedule, or any, could take?

Stages sleep instead of computing, so that more ranks than cores run side by side and the ideal
time of a step is exact. What is measured is work per rank ÷ time of a step: 1 is a full pipe.
In each round every contender runs one step; the best round of each counts.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import PENSTOCK, SCHEDULES, TORCH, Contender, Samples
from processes import environment, run_ranks

import penstock

WIDTH = 8


@dataclass(frozen=True)
class Case:
    """Ranks, microbatches, milliseconds of a rank's F, I and W, and a goal for our best."""

    p: int
    m: int
    forward_ms: int
    input_ms: int
    weight_ms: int
    goal: float
    """Our best, at no more memory than 1F1B, ÷ torch's best in the same run."""

    @property
    def work_ms(self) -> int:
        return self.m * (self.forward_ms + self.input_ms + self.weight_ms)

    @property
    def limit(self) -> float:
        """With two stages per rank, the last rank waits for p - 1 forwards of half a share."""
        return self.work_ms / (self.work_ms + (self.p - 1) * self.forward_ms / 2)

    def stage_ms(self, stages_per_rank: int) -> list[float]:
        """Times of F, I and W of one stage, of which a rank has so many."""
        times_ms = (self.forward_ms, self.input_ms, self.weight_ms)
        return [value / stages_per_rank for value in times_ms]

    def __str__(self) -> str:
        times = f"F/I/W {self.forward_ms}/{self.input_ms}/{self.weight_ms} ms"
        return f"{self.p} ranks, {self.m} microbatches, {times}"


CASES = [
    Case(2, 8, 20, 20, 20, goal=1.02),
    Case(4, 8, 20, 20, 20, goal=1.03),
    Case(4, 16, 20, 20, 12, goal=1.03),
    Case(8, 16, 20, 20, 20, goal=1.03),
]


class Slow(torch.autograd.Function):
    """An identity whose forward and backward sleep."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class TimedStage(nn.Module):
    """Its F, I and W take given times."""

    def __init__(self, times_ms: Iterable[float]) -> None:
        super().__init__()
        self.times_s = tuple(value / 1e3 for value in times_ms)
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        forward_s, input_s, weight_s = self.times_s
        return Slow.apply(x, forward_s, input_s) + Slow.apply(self.weight, 0.0, weight_s)


def time_plain_loop(case: Case, stages_per_rank: int) -> float:
    """Work ÷ time of one rank's stages by autograd alone: no pipeline, nobody to wait for."""
    stages = [TimedStage(case.stage_ms(stages_per_rank)) for _ in range(stages_per_rank)]
    x, grad = torch.randn(1, WIDTH, requires_grad=True), torch.ones(1, WIDTH)
    times_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        for _ in range(case.m):
            for stage in stages:
                torch.autograd.backward(stage(x), grad)
        times_s.append(time.perf_counter() - start_s)
    return case.work_ms / 1e3 / min(times_s)


def run_case(case: Case, entered: list[Contender], warm_up: int, rounds: int) -> Samples:
    """What every rank runs."""
    x = torch.randn(case.m, WIDTH, requires_grad=True)  # So that stage 0 has an I to do as well.
    target = torch.randn(case.m, WIDTH)
    entrants = [
        entrant
        for contender in entered
        if (
            entrant := contenders.enter(
                contender,
                case.m,
                lambda stage, count: TimedStage(case.stage_ms(count // case.p)),
                nn.functional.mse_loss,
            )
        )
    ]
    return contenders.run_rounds(
        entrants,
        lambda entrant: contenders.time_step(entrant, x, target),
        title=str(case),
        warm_up=warm_up,
        rounds=rounds,
    )


def measure(case: Case, names: list[str], warm_up: int, rounds: int) -> Samples:
    entered = contenders.list_contenders(names)
    steps = len(entered) * (warm_up + rounds)
    timeout_s = 120 + steps * 3 * case.work_ms / 1e3
    args = (case, entered, warm_up, rounds)
    found: Samples = run_ranks(run_case, case.p, *args, timeout_s=timeout_s)
    return found


class Plan(NamedTuple):
    """What the simulator says of a schedule."""

    efficiency: float
    memory: float
    """Microbatches that the fullest rank holds."""


def simulate(case: Case, name: str) -> Plan | None:
    schedule = contenders.make_schedule(name, case.p, case.m)
    if schedule is None:
        return None
    count = schedule.placement.num_stages
    costs = penstock.CostTable.uniform(
        count,
        stages_per_rank=count // case.p,
        forward=case.forward_ms,
        backward_input=case.input_ms,
        backward_weight=case.weight_ms,
    )
    report = penstock.simulate(schedule, costs)
    return Plan(case.work_ms / report.makespan, report.peak_memory)


class Row(NamedTuple):
    """A line of the table: the efficiencies of a schedule in one case, None where there is none."""

    name: str
    torch: float | None
    ours: float | None
    simulated: float | None
    memory: float | None
    relative_memory: float | None
    """Its memory ÷ that of 1F1B."""

    @property
    def is_lean(self) -> bool:
        """Whether it holds no more than 1F1B."""
        return self.relative_memory is not None and self.relative_memory <= 1 + 1e-9


def rows_of(case: Case, names: list[str], samples: Samples) -> list[Row]:
    base = simulate(case, "1F1B")
    assert base is not None
    best = {
        contender: case.work_ms / 1e3 / min(contenders.step_times(ranks))
        for contender, ranks in samples.items()
    }
    rows = []
    for name in names:
        measured = (best.get(Contender(library, name)) for library in (TORCH, PENSTOCK))
        plan = simulate(case, name)
        planned = (*plan, plan.memory / base.memory) if plan else (None, None, None)
        rows.append(Row(name, *measured, *planned))
    return rows


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def case_table(case: Case, rows: list[Row]) -> Table:
    table = Table(title=f"{case}: work ÷ time of a step, best round (higher is better)")
    for column in ("schedule", "torch", "ours", "simulated", "memory", "÷ 1F1B's", "≤ 1F1B's"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in rows:
        memory = "-" if row.memory is None else f"{row.memory:g}"
        relative = "-" if row.relative_memory is None else f"{row.relative_memory:.2f}"
        values = map(show, (row.torch, row.ours, row.simulated))
        table.add_row(row.name, *values, memory, relative, "yes" if row.is_lean else "")
    return table


def summary(case: Case, rows: list[Row]) -> list[str]:
    """The limit, the best of each side, and the goal."""

    def best(title: str, among: list[tuple[float | None, str]]) -> tuple[float | None, str]:
        value, name = max(((v, name) for v, name in among if v is not None), default=(None, ""))
        return value, f"{title:<52}{show(value)} {name}"

    alone = time_plain_loop(case, 2)
    theirs, torchs = best("best of torch", [(row.torch, row.name) for row in rows])
    lean, leans = best(
        "best of ours at no more memory than 1F1B",
        [(row.ours, row.name) for row in rows if row.is_lean],
    )
    _, ours = best("best of ours at any memory", [(row.ours, row.name) for row in rows])
    lines = [
        torchs,
        f"{'limit for two stages per rank':<52}{case.limit:.3f}",
        f"{'the same stages in a plain loop, no pipeline':<52}{alone:.3f}",
        f"{'the limit, for a runtime that takes no time itself':<52}{case.limit * alone:.3f}",
        leans,
        ours,
    ]
    if theirs is not None and lean is not None:
        color = "red" if lean / theirs < case.goal else "default"
        ratio = f"[{color}]{lean / theirs:.3f}[/] (≥ {case.goal:.2f})"
        lines.append(f"{'ours ÷ torch, at no more memory than 1F1B':<52}{ratio}")
    return [*lines, ""]


def record_of(case: Case, rows: list[Row], samples: Samples) -> dict[str, Any]:
    steps = {" ".join(key): contenders.step_times(ranks) for key, ranks in samples.items()}
    return {
        **asdict(case),
        "limit": case.limit,
        "rows": [row._asdict() for row in rows],
        "step_s": steps,
    }


def parse_args() -> argparse.Namespace:
    numbers = ",".join(str(number) for number in range(1, len(CASES) + 1))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=numbers, help=f"of: {numbers} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case (default 5)")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before them (default 1)")
    parser.add_argument("--quick", action="store_true", help="the first case, 2 rounds")
    parser.add_argument("--only", metavar="NAME", action="append", help="this schedule; repeatable")
    parser.add_argument("--gloo", action="store_true", help="ours over gloo, as torch's is")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if unknown := [number for number in args.cases.split(",") if number not in numbers.split(",")]:
        parser.error(f"--cases: unknown {', '.join(unknown)}; expected some of {numbers}")
    args.cases = [CASES[int(number) - 1] for number in args.cases.split(",")]
    args.names = [penstock.schedules.get(name).name for name in args.only or SCHEDULES]
    if args.rounds < 1 or args.warm_up < 1:
        parser.error("--rounds and --warm-up: expected at least 1; the first step sets up")
    if args.quick:
        args.cases, args.rounds = CASES[:1], 2
    return args


def main() -> None:
    args = parse_args()
    console = Console(width=110, highlight=False)
    if args.gloo:
        os.environ["PENSTOCK_SHARED_MEMORY"] = "0"
    records = []
    for case in args.cases:
        samples = measure(case, args.names, args.warm_up, args.rounds)
        rows = rows_of(case, args.names, samples)
        console.print(case_table(case, rows), *summary(case, rows), sep="\n")
        records.append(record_of(case, rows, samples))
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        record = {**environment(), "gloo": args.gloo, "rounds": args.rounds, "cases": records}
        args.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

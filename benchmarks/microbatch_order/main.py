"""What is the order of microbatches worth that take different times, on real processes?

Stages sleep for given times, times a factor that each microbatch carries, so that more ranks than
cores run side by side. For each schedule, microbatches run as they are given, by the rule of
`by_work`, and in the best order that was found by trying many in the simulator. A schedule that was
searched for, with its order, is beside them. In each round every contender runs one step.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from processes import environment, run_ranks
from timed_stages.main import WIDTH, Slow

import penstock
from penstock import CostTable, Pipeline, PipelineStage, Schedule, schedules, simulate
from penstock.runtime.microbatch_order import order_by_work
from penstock.solver.sequences import with_sequence

NUM_RANKS, NUM_MICROBATCHES = 4, 12
TIMES_MS = (20.0, 20.0, 14.0)  # Of F, I and W of a rank's share, for a microbatch of factor 1.
SCHEDULES = ("1F1B", "ZB-H1", "ZB-V")
NUM_BATCHES = 2
SPREAD = 0.6  # Of the logarithms of the factors.
NUM_TRIED = 400


class ScaledStage(nn.Module):
    """Its F, I and W take given times, times the first value of its input."""

    def __init__(self, stages_per_rank: int) -> None:
        super().__init__()
        self.times_s = tuple(value / stages_per_rank / 1e3 for value in TIMES_MS)
        self.weight = nn.Parameter(torch.zeros(WIDTH))  # So that outputs are equal to inputs.

    def forward(self, x: Tensor) -> Tensor:
        factor = float(x.detach()[0, 0])
        forward_s, input_s, weight_s = (value * factor for value in self.times_s)
        return Slow.apply(x, forward_s, input_s) + Slow.apply(self.weight, 0.0, weight_s)


class Contender(NamedTuple):
    """A schedule, and the order in which a batch of these factors is given to it."""

    name: str
    how: str
    schedule: Schedule
    order: list[int]
    predicted_ms: float
    factors: list[float]

    @property
    def by_work(self) -> bool:
        return self.how == "by_work"


def costs_of(factors: list[float], num_stages: int) -> CostTable:
    forward, backward_input, backward_weight = TIMES_MS
    return CostTable.uniform(
        num_stages,
        stages_per_rank=num_stages // NUM_RANKS,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        time_scale=factors,
    )


def best_order(schedule: Schedule, costs: CostTable, begin: list[int], seed: int) -> list[int]:
    """The best order of a walk that takes two microbatches at a time, and keeps what is better."""
    generator = random.Random(seed)
    best, least = begin, simulate(with_sequence(schedule, begin), costs).makespan
    for _ in range(NUM_TRIED):
        tried = list(best)
        a, b = generator.sample(range(len(tried)), 2)
        tried[a], tried[b] = tried[b], tried[a]
        took = simulate(with_sequence(schedule, tried), costs).makespan
        if took < least:
            best, least = tried, took
    return best


def contenders_of(batch: int, quick: bool) -> list[Contender]:
    generator = random.Random(batch)
    factors = [min(4.0, generator.lognormvariate(0, SPREAD)) for _ in range(NUM_MICROBATCHES)]
    given = list(range(NUM_MICROBATCHES))
    found = []
    for name in SCHEDULES:
        schedule = schedules.get(name)(num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
        costs = costs_of(factors, schedule.num_stages)
        rule = order_by_work(factors, schedule.placement)
        orders = {"as given": given, "by_work": rule}
        if not quick:
            orders["best order"] = best_order(schedule, costs, rule, batch)
        for how, order in orders.items():
            took = simulate(with_sequence(schedule, order), costs).makespan
            found.append(Contender(name, how, schedule, order, took, factors))
    for num_stages, name in ((NUM_RANKS, "searched, linear"), (2 * NUM_RANKS, "searched, V")):
        costs = costs_of(factors, num_stages)
        placement = penstock.Placement.v(NUM_RANKS) if num_stages > NUM_RANKS else None
        best = penstock.search(
            costs,
            NUM_RANKS,
            NUM_MICROBATCHES,
            placements=None if placement is None else [placement],
            effort=0.05 if quick else 0.1,
        )
        found.append(Contender(name, "", best.schedule, given, best.report.makespan, factors))
    return found


def time_steps(entered: list[Contender], warm_up: int, rounds: int) -> list[list[float]]:
    """What every rank runs: the time of the slowest rank in ms, by contender and round."""
    pipelines = []
    for one in entered:
        placement = one.schedule.placement
        stages = [
            PipelineStage(
                ScaledStage(placement.num_stages // NUM_RANKS),
                stage,
                placement.num_stages,
                torch.device("cpu"),
            )
            for stage in placement.stages_of(dist.get_rank())
        ]
        pipelines.append(
            Pipeline(stages, one.schedule, loss_fn=nn.functional.mse_loss, by_work=one.by_work)
        )
    samples: list[list[float]] = [[] for _ in entered]
    for number in range(warm_up + rounds):
        for place, (one, pipeline) in enumerate(zip(entered, pipelines, strict=True)):
            # With by_work, the pipeline orders the batch itself.
            order = list(range(NUM_MICROBATCHES)) if one.by_work else one.order
            factors = torch.tensor([one.factors[mb] for mb in order])
            x = factors[:, None].expand(-1, WIDTH).clone().requires_grad_()
            work = one.factors if one.by_work else None
            dist.barrier()
            start_s = time.perf_counter()
            pipeline.step(x, target=torch.zeros_like(x), work=work)
            took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= warm_up:
                samples[place].append(float(took) * 1e3)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one batch, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    console = Console(width=100, highlight=False)
    record = []
    for batch in range(1 if args.quick else NUM_BATCHES):
        entered = contenders_of(batch, args.quick)
        samples = run_ranks(time_steps, NUM_RANKS, entered, 1, rounds, timeout_s=170)
        table = Table(
            title=f"batch {batch}, {rounds} rounds: "
            + " ".join(f"{factor:.2g}" for factor in entered[0].factors)
        )
        for column in ("schedule", "order", "ms", "quartiles", "predicted", "÷ as given"):
            table.add_column(column, justify="left" if column in ("schedule", "order") else "right")
        base = 0.0
        for one, times in zip(entered, samples, strict=True):
            median = statistics.median(times)
            base = median if one.how == "as given" else base
            low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (median,) * 3
            share = "" if not one.how else f"{median / base:.3f}"
            table.add_row(
                one.name,
                one.how,
                f"{median:.0f}",
                f"{low:.0f}-{high:.0f}",
                f"{one.predicted_ms:.0f}",
                share,
            )
            figures = {"batch": batch, "schedule": one.name, "order": one.how, "ms": times}
            record.append({**figures, "predicted_ms": one.predicted_ms})
        console.print(table)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps({**environment(), "steps": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Steps of a model on 8 GPUs that others have measured, with the times of its stages."""

import csv
from pathlib import Path
from typing import NamedTuple

from penstock import CostTable, Report, schedules, simulate

TABLE = Path(__file__).parent / "data" / "measured_gpu_runs.csv"


class Run(NamedTuple):
    """One measured run; times are in ms, and those of stages are for one microbatch."""

    kind: str
    """`base` for layers shared out evenly, `redis` for layers that the authors moved."""
    seq: int
    vocab: int
    num_microbatches: int
    iteration: float
    forward: list[float]
    backward: list[float]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seq}-{self.vocab}"


def read_runs() -> list[Run]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return [
        Run(
            kind=line["kind"],
            seq=int(line["seq"]),
            vocab=int(line["vocab"]),
            num_microbatches=int(line["m"]),
            iteration=float(line["iteration_ms"]),
            forward=[float(time) / 1000 for time in line["forward_us"].split()],
            backward=[float(time) / 1000 for time in line["backward_us"].split()],
        )
        for line in csv.DictReader(lines)
    ]


def simulate_stages(
    name: str, num_microbatches: int, forward: list[float], backward: list[float]
) -> Report:
    """Simulate a step on 8 ranks, with messages that take nothing.

    The halves of backwards were not measured: for schedules that split them, they are equal.
    """
    half = [time / 2 for time in backward]
    costs = CostTable(forward=forward, backward=backward, backward_input=half, backward_weight=half)
    schedule = schedules.get(name)(
        num_ranks=8, num_microbatches=num_microbatches, stages_per_rank=len(forward) // 8
    )
    return simulate(schedule, costs)

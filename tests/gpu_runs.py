"""Steps of a model on 8 GPUs that others have measured, with the times of its stages."""

import csv
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from penstock import CostTable, Report, schedules, simulate
from penstock.partition import Partition

TABLE = Path(__file__).parent / "data" / "measured_gpu_runs.csv"

# How many of the 32 layers the authors gave to each stage, as the forwards show.
MOVED = {
    (2048, 256000): (4, 4, 4, 5, 5, 5, 5, 0),
    (2048, 64000): (4, 4, 4, 4, 4, 4, 5, 3),
    (4096, 128000): (4, 4, 4, 4, 4, 5, 5, 2),
    (4096, 32000): (4, 4, 4, 4, 4, 4, 4, 4),
}


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
    def counts(self) -> tuple[int, ...]:
        """The number of layers of each stage, of 32."""
        return (4,) * 8 if self.kind == "base" else MOVED[self.seq, self.vocab]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of each stage, of those in `layers`."""
        return (0, *accumulate(self.counts[1:-1], initial=1 + self.counts[0]))

    def layers(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the forwards and backwards of the embedding, 32 equal layers, and the head.

        What the first and the last stage take beyond their layers is of the embedding, and of the
        head with the loss.
        """
        forward, backward = (self._layers(times) for times in (self.forward, self.backward))
        return forward, backward

    def _layers(self, times: list[float]) -> tuple[float, ...]:
        each = sum(times[1:-1]) / sum(self.counts[1:-1])
        first = times[0] - self.counts[0] * each
        if first < 0:  # Noise is more than the embedding takes: the first stage is like others.
            first, each = 0.0, sum(times[:-1]) / sum(self.counts[:-1])
        return (first, *[each] * 32, times[-1] - self.counts[-1] * each)

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


def simulate_cut(name: str, run: Run, cut: Partition) -> Report:
    """Simulate a step of the layers of a run, cut in another way."""
    stages = [Partition(cut.starts, times, cut.placement).stage_costs for times in run.layers()]
    return simulate_stages(name, run.num_microbatches, *stages)


def simulate_stages(
    name: str, num_microbatches: int, forward: Sequence[float], backward: Sequence[float]
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

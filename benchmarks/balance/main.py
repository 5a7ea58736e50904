"""How much faster is a step if the model is cut by what its layers cost, not into equal counts?

Three models with uneven layers, on two ranks, each on a core of its own. In each round every cut
runs one step of each schedule; medians over the rounds are compared, and two simulations: with the
costs of layers, by which models are cut, and with those of the stages that the cut makes.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import Contender, Entrant, Samples
from processes import environment, run_ranks
from split_backward.model import Block

import penstock

RANKS, WARM_UP = 2, 2
SCHEDULES = ("1F1B", "ZB-V")
VOCABULARY = 16000
EVEN, LAYERS, COUNTED, MEASURED = CUTS = "even", "without the loss", "counted", "measured"


class Decoder(nn.Module):
    """Equal blocks, and a large vocabulary: the head costs as much as several blocks."""

    def __init__(self, width: int = 192, num_blocks: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Narrow(Decoder):
    """Small blocks: the loss costs as much as several of them too."""

    def __init__(self) -> None:
        super().__init__(width=64, num_blocks=16)


class Pyramid(nn.Module):
    """Layers that widen: the last one costs 16 times as much as the first."""

    def __init__(self) -> None:
        super().__init__()
        widths = [128, 128, 192, 256, 384, 512, 640, 768, 896, 1024]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b))
                for a, b in pairwise(widths)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Case(NamedTuple):
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    rounds: int


def decoder_batch(m: int) -> tuple[Tensor, Tensor]:
    tokens, target = torch.randint(VOCABULARY, (2, m * 2, 64))
    return tokens, target


def pyramid_batch(m: int) -> tuple[Tensor, Tensor]:
    return torch.randn(m * 128, 128), torch.randn(m * 128, 1024)


def token_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten())


CASES = {
    "decoder": Case(Decoder, decoder_batch, token_loss, rounds=20),
    "narrow": Case(Narrow, decoder_batch, token_loss, rounds=20),
    "pyramid": Case(Pyramid, pyramid_batch, nn.functional.mse_loss, rounds=40),
}
LayerCosts = list[penstock.LayerCost]


class Way(NamedTuple):
    """A schedule, and the first layer of each of its stages."""

    schedule: str
    starts: tuple[int, ...]

    def sizes(self, num_layers: int) -> str:
        return "+".join(str(end - start) for start, end in pairwise((*self.starts, num_layers)))


class Measured(NamedTuple):
    """What the ranks have measured for one model."""

    layers: LayerCosts
    ways: dict[tuple[str, str], Way]
    """By schedule and cut; cuts that are the same share one."""
    samples: Samples
    stages: dict[Way, penstock.CostTable]


def choose(cut: str, name: str, case: Case, layers: LayerCosts) -> Way:
    """Cut the layers for a schedule."""
    schedule = make_schedule(name, RANKS)  # Any number of microbatches has its placement.
    if cut == EVEN:  # As many layers in each stage, wherever it is placed.
        policy = penstock.Balanced(schedule.num_stages)
        costs: list[Any] = [1.0] * len(layers)
    else:
        policy = penstock.Balanced(schedule.num_stages, placement=schedule.placement)
        inputs, target = case.make_batch(1)
        loss: dict[str, Any] = {"loss_fn": case.loss_fn, "target": target} if cut != LAYERS else {}
        counted = penstock.count_layers(case.make_model(), (inputs,), **loss)
        costs = layers if cut == MEASURED else counted
    return Way(name, policy.choose(costs, [layer.name for layer in layers]))


def make_schedule(name: str, m: int) -> penstock.Schedule:
    schedule = contenders.make_schedule(name, RANKS, m)
    assert schedule is not None
    return schedule


def make_stages(
    way: Way, case: Case, layers: LayerCosts, schedule: penstock.Schedule
) -> list[penstock.PipelineStage]:
    """Return the stages of this rank."""
    torch.manual_seed(0)
    inputs, _ = case.make_batch(1)
    spec = {layers[start].name: penstock.SplitPoint.BEGINNING for start in way.starts[1:]}
    pieces = penstock.cut(case.make_model(), (inputs,), split_spec=spec)
    held = schedule.placement.stages_of(dist.get_rank())
    return [pieces.build_stage(stage, "cpu") for stage in held]


def enter(way: Way, case: Case, m: int, layers: LayerCosts) -> Entrant:
    """Return the stages of one cut on this rank, ready to step."""
    schedule = make_schedule(way.schedule, m)
    stages = make_stages(way, case, layers, schedule)
    held = schedule.placement.stages_of(dist.get_rank())
    return Entrant(
        Contender(way.sizes(len(layers)), way.schedule),
        [stage.submod for stage in stages],
        penstock.Pipeline(stages, schedule, loss_fn=case.loss_fn),
        0 in held,
        schedule.num_stages - 1 in held,
    )


def measure_layers(case: Case, repeats: int) -> LayerCosts:
    """Measure on all ranks at once, as busy as in a step, and return the mean of what they find."""
    torch.manual_seed(0)
    inputs, target = case.make_batch(1)
    model = case.make_model()
    dist.barrier()
    mine = penstock.measure_layers(
        model, (inputs,), repeats=repeats, loss_fn=case.loss_fn, target=target
    )
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, mine)
    return [
        replace(costs[0], time=statistics.mean(cost.time for cost in costs))
        for costs in zip(*everyone, strict=True)
    ]


def measure_stages(
    way: Way, case: Case, m: int, layers: LayerCosts, batch: tuple[Tensor, Tensor], repeats: int
) -> penstock.CostTable:
    """Measure what the stages of a cut cost, in steps on both ranks."""
    schedule = make_schedule(way.schedule, m)
    stages = make_stages(way, case, layers, schedule)
    held = schedule.placement.stages_of(dist.get_rank())
    inputs = batch[:1] if 0 in held else ()
    target = batch[1] if schedule.num_stages - 1 in held else None
    return penstock.measure_costs(stages, m, case.loss_fn, *inputs, target=target, repeats=repeats)


def run_case(case_name: str, m: int, rounds: int, repeats: int) -> Measured:
    """Measure one model; both ranks run this."""
    case = CASES[case_name]
    layers = measure_layers(case, repeats)
    ways = {(name, cut): choose(cut, name, case, layers) for name in SCHEDULES for cut in CUTS}
    different = list(dict.fromkeys(ways.values()))
    entrants = [enter(way, case, m, layers) for way in different]
    torch.manual_seed(1)
    x, target = case.make_batch(m)

    def take_sample(entrant: Entrant) -> contenders.Sample:
        return contenders.time_step(entrant, x, target, lead_in=1)

    samples = contenders.run_rounds(
        entrants, take_sample, title=case_name, warm_up=WARM_UP, rounds=rounds
    )
    stages = {way: measure_stages(way, case, m, layers, (x, target), repeats) for way in different}
    return Measured(layers, ways, samples, stages)


def simulated_from_layers(way: Way, m: int, layers: LayerCosts) -> float:
    """Seconds of a step by the simulator; a third of a layer's time is its forward."""
    thirds = [
        sum(layer.time for layer in layers[start:end]) / 3
        for start, end in pairwise((*way.starts, len(layers)))
    ]
    costs = penstock.CostTable(forward=thirds, backward_input=thirds, backward_weight=thirds)
    return penstock.simulate(make_schedule(way.schedule, m), costs).makespan


class Row(NamedTuple):
    """One cut by one schedule; times in seconds."""

    schedule: str
    cut: str
    layers: str
    quartiles: tuple[float, float, float]
    by_stages: float
    by_layers: float

    def ratios(self, even: "Row") -> tuple[float, float, float]:
        """Return the measured time and both simulated ones, each ÷ that of the even cut."""
        return (
            self.quartiles[1] / even.quartiles[1],
            self.by_stages / even.by_stages,
            self.by_layers / even.by_layers,
        )


def make_rows(m: int, measured: Measured) -> list[Row]:
    num_layers = len(measured.layers)
    rows = []
    for (name, cut), way in measured.ways.items():
        sizes = way.sizes(num_layers)
        times = contenders.step_times(measured.samples[Contender(sizes, name)])
        by_stages = penstock.simulate(make_schedule(name, m), measured.stages[way]).makespan
        by_layers = simulated_from_layers(way, m, measured.layers)
        rows.append(Row(name, cut, sizes, contenders.quartiles(times), by_stages, by_layers))
    return rows


def report(case_name: str, m: int, measured: Measured, console: Console) -> dict[str, Any]:
    """Print one model's table, as in the README; return what is to be saved."""
    rows = make_rows(m, measured)
    record: dict[str, Any] = {"layer_s": {layer.name: layer.time for layer in measured.layers}}
    console.print(f"{case_name}, {len(measured.layers)} layers, {m} microbatches")
    console.print("| schedule | cut | layers | ms | ÷ even | simulated, by stages | by layers |")
    console.print("|---|---|---|--:|--:|--:|--:|")
    even = rows[0]
    for row in rows:
        even = row if row.cut == EVEN else even
        ratios = row.ratios(even)
        low, middle, high = (f"{time * 1e3:.1f}" for time in row.quartiles)
        cells = [row.schedule, row.cut, row.layers, f"{middle} [{low}-{high}]"]
        cells += [f"{ratio:.3f}" if row is not even else "" for ratio in ratios]
        console.print(f"| {' | '.join(cells)} |", markup=False)
        record[f"{row.schedule} {row.cut}"] = {
            "layers": row.layers,
            "step_s_quartiles": row.quartiles,
            "simulated_s_by_stages": row.by_stages,
            "simulated_s_by_layers": row.by_layers,
            "measured_ratio": ratios[0],
            "simulated_ratio_by_stages": ratios[1],
            "simulated_ratio_by_layers": ratios[2],
        }
    return record


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(CASES), help="default: all")
    parser.add_argument("--microbatches", type=int, default=8, help="in a step (default 8)")
    parser.add_argument("--rounds", type=int, help="of each model (default: 20, or 40 for pyramid)")
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the rounds, a third of the repeats"
    )
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for each model")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if unknown := [name for name in args.models.split(",") if name not in CASES]:
        parser.error(f"--models: unknown {', '.join(unknown)}; expected some of {', '.join(CASES)}")
    return args


def main() -> None:
    args = parse_args()
    console = Console(width=200, highlight=False)
    record: dict[str, Any] = {**environment(), "microbatches": args.microbatches}
    for name in args.models.split(","):
        rounds = args.rounds or max(5, CASES[name].rounds // (4 if args.quick else 1))
        work = run_case, RANKS, name, args.microbatches, rounds, 3 if args.quick else 9
        measured = run_ranks(*work, timeout_s=args.timeout, pin_to_cores=True)
        record[name] = report(name, args.microbatches, measured, console)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How much faster is a step if the model is cut by what its layers cost, not into equal counts?

Two models with uneven layers, on two ranks, each on a core of its own. In each round every cut
runs one step of each schedule; medians over the rounds are compared, and the simulator's too.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
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
EVEN, COUNTED, MEASURED = CUTS = "even", "counted", "measured"


class Decoder(nn.Module):
    """Equal blocks, and a large vocabulary: the head costs as much as several blocks."""

    def __init__(self, width: int = 192, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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
    "pyramid": Case(Pyramid, pyramid_batch, nn.functional.mse_loss, rounds=40),
}
LayerCosts = list[penstock.LayerCost]


def cut_policy(cut: str, schedule: penstock.Schedule, layers: LayerCosts) -> penstock.Balanced:
    if cut == EVEN:  # As many layers in each stage, wherever it is placed.
        return penstock.Balanced(schedule.num_stages, costs=[1.0] * len(layers))
    costs = layers if cut == MEASURED else None
    return penstock.Balanced(schedule.num_stages, costs=costs, placement=schedule.placement)


def enter(cut: str, name: str, case: Case, m: int, layers: LayerCosts) -> Entrant:
    """The stages of one cut, on this rank."""
    schedule = contenders.make_schedule(name, RANKS, m)
    assert schedule is not None
    torch.manual_seed(0)
    model = case.make_model()
    inputs, _ = case.make_batch(1)
    pipe = penstock.cut(model, (inputs,), split_policy=cut_policy(cut, schedule, layers))
    held = schedule.placement.stages_of(dist.get_rank())
    stages = [pipe.build_stage(stage, "cpu") for stage in held]
    return Entrant(
        Contender(cut, name),
        [stage.submod for stage in stages],
        penstock.Pipeline(stages, schedule, loss_fn=case.loss_fn),
        0 in held,
        schedule.num_stages - 1 in held,
    )


def measure_on_rank_0(case: Case) -> LayerCosts:
    torch.manual_seed(0)
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        inputs, _ = case.make_batch(1)
        shared = [penstock.measure_layers(case.make_model(), (inputs,), repeats=15)]
    dist.broadcast_object_list(shared)
    return shared[0]


def run_case(case_name: str, m: int, rounds: int) -> tuple[LayerCosts, Samples]:
    """What both ranks run."""
    case = CASES[case_name]
    layers = measure_on_rank_0(case)
    entrants = [enter(cut, name, case, m, layers) for name in SCHEDULES for cut in CUTS]
    torch.manual_seed(1)
    x, target = case.make_batch(m)

    def take_sample(entrant: Entrant) -> contenders.Sample:
        return contenders.time_step(entrant, x, target, lead_in=1)

    samples = contenders.run_rounds(
        entrants, take_sample, title=case_name, warm_up=WARM_UP, rounds=rounds
    )
    return layers, samples


def choose(cut: str, name: str, case: Case, m: int, layers: LayerCosts) -> tuple[int, ...]:
    """The first layer of each stage."""
    schedule = contenders.make_schedule(name, RANKS, m)
    assert schedule is not None
    policy = cut_policy(cut, schedule, layers)
    costs = policy.costs
    if costs is None:
        inputs, _ = case.make_batch(1)
        costs = penstock.count_layers(case.make_model(), (inputs,))
    return policy.choose(costs, [layer.name for layer in layers])


def simulated(starts: tuple[int, ...], name: str, m: int, layers: LayerCosts) -> float:
    """Seconds of a step by the simulator; a third of a layer's time is its forward."""
    schedule = contenders.make_schedule(name, RANKS, m)
    assert schedule is not None
    ends = (*starts[1:], len(layers))
    thirds = [
        sum(layer.time for layer in layers[start:end]) / 3
        for start, end in zip(starts, ends, strict=True)
    ]
    costs = penstock.CostTable(forward=thirds, backward_input=thirds, backward_weight=thirds)
    return penstock.simulate(schedule, costs).makespan


def sizes(starts: tuple[int, ...], num_layers: int) -> str:
    ends = (*starts[1:], num_layers)
    return "+".join(str(end - start) for start, end in zip(starts, ends, strict=True))


def report(
    case_name: str, m: int, layers: LayerCosts, samples: Samples, console: Console
) -> dict[str, Any]:
    """Print one model's table; what is to be saved."""
    table = Table(title=f"{case_name}, {len(layers)} layers, {m} microbatches")
    for column in ("schedule", "cut", "layers", "ms \\[middle half]", "÷ even", "simulated ÷ even"):
        table.add_column(column, justify="left" if column in ("schedule", "cut") else "right")
    record: dict[str, Any] = {"layer_s": {layer.name: layer.time for layer in layers}}
    for name in SCHEDULES:
        times = {cut: contenders.step_times(samples[Contender(cut, name)]) for cut in CUTS}
        starts = {cut: choose(cut, name, CASES[case_name], m, layers) for cut in CUTS}
        planned = {cut: simulated(starts[cut], name, m, layers) for cut in CUTS}
        for cut in CUTS:
            low, middle, high = contenders.quartiles(times[cut])
            measured = middle / statistics.median(times[EVEN])
            ratio = planned[cut] / planned[EVEN]
            spread = f"{middle * 1e3:.1f} \\[{low * 1e3:.1f}-{high * 1e3:.1f}]"
            counts = sizes(starts[cut], len(layers))
            table.add_row(name, cut, counts, spread, f"{measured:.3f}", f"{ratio:.3f}")
            record[f"{name} {cut}"] = {
                "layers": counts,
                "step_s_quartiles": (low, middle, high),
                "measured_ratio": measured,
                "simulated_ratio": ratio,
            }
    console.print(table)
    return record


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(CASES), help="default: all")
    parser.add_argument("--microbatches", type=int, default=8, help="in a step (default 8)")
    parser.add_argument("--rounds", type=int, help="of each model (default: 20, 40)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for each model")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if unknown := [name for name in args.models.split(",") if name not in CASES]:
        parser.error(f"--models: unknown {', '.join(unknown)}; expected some of {', '.join(CASES)}")
    return args


def main() -> None:
    args = parse_args()
    console = Console(width=110, highlight=False)
    record: dict[str, Any] = {**environment(), "microbatches": args.microbatches}
    for name in args.models.split(","):
        rounds = args.rounds or max(5, CASES[name].rounds // (4 if args.quick else 1))
        work = run_case, RANKS, name, args.microbatches, rounds
        layers, samples = run_ranks(*work, timeout_s=args.timeout, pin_to_cores=True)
        record[name] = report(name, args.microbatches, layers, samples, console)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

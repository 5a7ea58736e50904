"""What does it cost to split a stage's backward into an input half and a weight half?

In every round each contender runs once, on the same model and data, in an order that
rotates. Medians over the rounds are compared, as ratios to plain autograd's full backward.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from model import SIZES, Size, Stage
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributed.pipelining import _backward as torch_functions

sys.path.append(str(Path(__file__).parents[1]))
from process_memory import allocated_bytes, keep_freed_pages

from penstock import backward as penstock_functions
from penstock.backward import SplitEngine

PLAIN, TORCH, FUNCTIONS, ENGINE = "autograd", f"torch {torch.__version__}", "functions", "engine"

# The most that (I + W) / full backward may be.
LIMITS = {
    "S": {FUNCTIONS: 1.35, ENGINE: 1.10},
    "M": {FUNCTIONS: 1.00, ENGINE: 1.00},
    "L": {FUNCTIONS: 1.00, ENGINE: 1.00},
    "M checkpointed": {FUNCTIONS: 1.10, ENGINE: 1.05},
}
# The most that the engine's forward / plain forward may be.
FORWARD_LIMITS = {"S": 1.15, "M": 1.03, "L": 1.02}
WEIGHT_SHARE_LIMIT = 0.35  # of the engine, on M and L
RECOMPUTATION_LIMIT, LIVE_BYTES_LIMIT = 4, 1.0


@dataclass(frozen=True)
class Times:
    """Seconds of one round, or medians over rounds. A full backward counts as `input_s`."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s


Watch = Callable[[str], None]
"""Called after the forward ("F"), the input half ("I") and the weight half ("W")."""

Contender = Callable[[Tensor, Tensor, Watch], None]


def contenders(stage: Stage) -> dict[str, Contender]:
    weights = list(stage.parameters())
    engine = SplitEngine(stage)

    def plain(x: Tensor, grad: Tensor, watch: Watch) -> None:
        out = stage(x)
        watch("F")
        torch.autograd.backward(out, grad)
        watch("I")

    def split_by(functions: Any) -> Contender:
        def split(x: Tensor, grad: Tensor, watch: Watch) -> None:
            out = stage(x)
            watch("F")
            _, groups = functions.stage_backward_input([out], [grad], [x], weights)
            watch("I")
            functions.stage_backward_weight(weights, groups)
            watch("W")

        return split

    def by_engine(x: Tensor, grad: Tensor, watch: Watch) -> None:
        forward = engine.forward(x)
        watch("F")
        _, pending = forward.backward_input(grad)
        watch("I")
        pending.run()
        watch("W")

    return {
        PLAIN: plain,
        TORCH: split_by(torch_functions),
        FUNCTIONS: split_by(penstock_functions),
        ENGINE: by_engine,
    }


def data_for(size: Size) -> tuple[Tensor, Tensor]:
    shape = (size.batch, size.tokens, size.width)
    return torch.randn(shape, requires_grad=True), torch.randn(shape)


def time_once(contender: Contender, x: Tensor, grad: Tensor) -> Times:
    marks = [time.perf_counter()]
    contender(x, grad, lambda _: marks.append(time.perf_counter()))
    x.grad = None
    spans = [end - start for start, end in pairwise(marks)]
    return Times(*spans, *[0.0] * (3 - len(spans)))


def measure(name: str, rounds: int) -> dict[str, list[Times]]:
    """All contenders' times in every round, warm-up left out."""
    torch.manual_seed(0)
    stage = Stage(SIZES[name])
    x, grad = data_for(SIZES[name])
    entrants = list(contenders(stage).items())
    times: dict[str, list[Times]] = {who: [] for who, _ in entrants}
    warm_up = max(3, rounds // 10)
    for number in track(range(warm_up + rounds), f"{name:>14}", transient=True):
        for offset in range(len(entrants)):
            who, contender = entrants[(number + offset) % len(entrants)]
            sample = time_once(contender, x, grad)
            if number >= warm_up:
                times[who].append(sample)
    return times


def medians(samples: list[Times]) -> Times:
    columns = zip(*(asdict(sample).values() for sample in samples), strict=True)
    return Times(*(statistics.median(column) for column in columns))


def ratios(times: dict[str, list[Times]], who: str) -> tuple[float, float, float]:
    """(I + W) / full backward: of medians, and the middle half of the rounds' own ratios."""
    base = times[PLAIN]
    each = [a.backward_s / b.backward_s for a, b in zip(times[who], base, strict=True)]
    low, _, high = statistics.quantiles(each, n=4)
    return medians(times[who]).backward_s / medians(base).backward_s, low, high


def recomputations(name: str, who: str) -> int:
    """How often blocks were run again in one backward."""
    stage = Stage(SIZES[name])
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    contender = contenders(stage)[who]
    for block in stage.blocks:
        block.register_forward_pre_hook(count)
    contender(*data_for(SIZES[name]), lambda _: None)
    return calls - SIZES[name].blocks


def live_bytes(name: str, who: str) -> tuple[int, int]:
    """Bytes that one microbatch keeps allocated after F, and after I less the input gradient."""
    stage = Stage(SIZES[name])
    x, grad = data_for(SIZES[name])
    contender = contenders(stage)[who]
    contender(x, grad, lambda _: None)  # from here on every parameter has its gradient
    x.grad = None
    start = allocated_bytes()
    seen: dict[str, int] = {}
    contender(x, grad, lambda phase: seen.update({phase: allocated_bytes() - start}))
    return seen["F"], seen["I"] - x.nbytes


def marked(text: str, is_met: bool) -> str:
    return text if is_met else f"[red]{text} over[/]"


def time_table(results: dict[str, dict[str, list[Times]]]) -> Table:
    table = Table(title="(I + W) ÷ full backward of plain autograd (limit) [middle half of rounds]")
    for column in ("size", "full backward", TORCH, FUNCTIONS, ENGINE):
        table.add_column(column, justify="right")
    for name, times in results.items():
        cells = [name, f"{medians(times[PLAIN]).backward_s * 1e3:.2f} ms"]
        for who in (TORCH, FUNCTIONS, ENGINE):
            ratio, low, high = ratios(times, who)
            limit = LIMITS[name].get(who)
            bound = "" if limit is None else f"(≤ {limit:.2f}) "
            text = f"{ratio:.2f} {bound}\\[{low:.2f}-{high:.2f}]"
            cells.append(marked(text, limit is None or ratio <= limit))
        table.add_row(*cells)
    return table


def halves_table(results: dict[str, dict[str, list[Times]]]) -> Table:
    table = Table(title="The halves apart, each ÷ full backward; engine's forward ÷ plain forward")
    for column in ("size", "torch I + W", "functions I + W", "engine I + W", "W share", "forward"):
        table.add_column(column, justify="right")
    for name, times in results.items():
        full = medians(times[PLAIN])
        cells = [name]
        for who in (TORCH, FUNCTIONS, ENGINE):
            mine = medians(times[who])
            parts = (mine.input_s / full.backward_s, mine.weight_s / full.backward_s)
            cells.append(f"{parts[0]:.2f} + {parts[1]:.2f}")
        mine = medians(times[ENGINE])
        share, forward = mine.weight_s / mine.backward_s, mine.forward_s / full.forward_s
        is_limited = name in ("M", "L")
        limit = FORWARD_LIMITS.get(name, float("inf"))
        cells.append(marked(f"{share:.0%}", not is_limited or share >= WEIGHT_SHARE_LIMIT))
        cells.append(marked(f"{forward:.2f}", forward <= limit))
        table.add_row(*cells)
    return table


def counts(names: list[str]) -> dict[str, dict[str, str]]:
    """Recomputations and live bytes, which need no repetition."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        for who in (TORCH, FUNCTIONS, ENGINE):
            if SIZES[name].is_checkpointed:
                calls = recomputations(name, who)
                found.setdefault("recomputations", {})[who] = marked(
                    str(calls), who is TORCH or calls <= RECOMPUTATION_LIMIT
                )
            if name == "L":
                after_f, after_i = live_bytes(name, who)
                text = f"{after_i / after_f:.3f} ({after_i / 1e6:.1f} of {after_f / 1e6:.1f} MB)"
                found.setdefault("live bytes", {})[who] = marked(
                    text, who is TORCH or after_i <= LIVE_BYTES_LIMIT * after_f
                )
    return found


def counts_table(found: dict[str, dict[str, str]]) -> Table:
    titles = {
        "recomputations": f"block recomputations for 4 blocks (≤ {RECOMPUTATION_LIMIT})",
        "live bytes": f"live bytes after I ÷ after F, L (≤ {LIVE_BYTES_LIMIT})",
    }
    table = Table(title="Counts")
    for column in ("", TORCH, FUNCTIONS, ENGINE):
        table.add_column(column, justify="right")
    for kind, values in found.items():
        table.add_row(titles[kind], *(values[who] for who in (TORCH, FUNCTIONS, ENGINE)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of: {', '.join(SIZES)}")
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--default-malloc", action="store_true", help="glibc as it comes")
    parser.add_argument("--process-group", action="store_true", help="functions signal reducers")
    parser.add_argument("--save", type=Path, help="write the medians to this JSON file")
    args = parser.parse_args()
    names = args.sizes.split(",")
    if unknown := [name for name in names if name not in SIZES]:
        parser.error(f"--sizes: unknown {', '.join(unknown)}; expected some of {', '.join(SIZES)}")

    torch.set_num_threads(1)
    if not args.default_malloc:
        keep_freed_pages()
    if args.process_group:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    console = Console(width=118)
    results = {
        name: measure(name, SIZES[name].rounds // (5 if args.quick else 1)) for name in names
    }
    console.print(time_table(results), halves_table(results))
    found = counts(names)
    if found:
        console.print(counts_table(found))
    if args.save:
        record = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "date": datetime.now(UTC).date().isoformat(),
            "options": " ".join(sys.argv[1:]),
            "median_s": {
                name: {who: asdict(medians(samples)) for who, samples in times.items()}
                for name, times in results.items()
            },
            "ratio_low_high": {
                name: {who: ratios(times, who) for who in times} for name, times in results.items()
            },
            "counts": found,
        }
        args.save.write_text(json.dumps(record, indent=1) + "\n")
    if args.process_group:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

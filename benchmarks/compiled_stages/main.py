"""What does it cost to split a compiled backward, and what does a pipeline gain by it?

main.py halves     both halves beside the whole compiled backward, and the eager engine
main.py steps      steps on two ranks, compiled and eager, beside torch's classes
main.py compiler   how long the compiler takes, with an empty cache and with a full one
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import PENSTOCK, TORCH, Contender
from process_memory import allocated_bytes, keep_freed_pages
from processes import environment, run_ranks
from split_backward.model import HEADS, Block

import penstock
from penstock.backward import SplitEngine

BLOCKS = 4
# Width: batch, tokens, rounds.
SIZES = {64: (1, 16, 400), 256: (2, 64, 80), 512: (4, 128, 20)}
WHOLE, SPLIT, EAGER = "torch.compile, whole", "penstock.compile, split", "eager engine, split"
OPAQUE = "eager engine, split, with attention by torch.compile"
Quartiles = tuple[float, float, float]


def compile_all(blocks: nn.Sequential, compiler: Callable[[Any], Any], unit: str) -> nn.Module:
    """Return the blocks, compiled one by one or as one."""
    if unit == "stage":
        return compiler(blocks)  # type: ignore[no-any-return]  # a compiled module
    return nn.Sequential(*map(compiler, blocks))


def attend(qkv: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2)


class OpaqueBlock(Block):
    """A block whose attention alone is compiled, by torch.compile."""

    def __init__(self, width: int, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__(width)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, width // HEADS)
        x = x + self.out(self.attend(qkv).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def opaque_blocks(blocks: nn.Sequential, width: int) -> nn.Sequential:
    """Return blocks with the same weights, whose attention is compiled."""
    compiled = torch.compile(attend)
    opaque = nn.Sequential(*(OpaqueBlock(width, compiled) for _ in blocks))
    opaque.load_state_dict(blocks.state_dict())
    return opaque


class Halves:
    """A contender: its forward, and one or two halves of its backward, in seconds."""

    def __init__(self, module: nn.Module, *, is_split: bool) -> None:
        self.module = module
        self._engine = SplitEngine(module) if is_split else None

    def run(self, x: Tensor, grad: Tensor) -> list[float]:
        """Return the seconds of F, of I or the whole backward, and of W."""
        marks = [time.perf_counter()]

        def mark() -> None:
            marks.append(time.perf_counter())

        if self._engine is None:
            out = self.module(x)
            mark()
            torch.autograd.backward(out, grad)
            mark()
            mark()
        else:
            forward = self._engine.forward(x)
            mark()
            _, pending = forward.backward_input(grad)
            mark()
            pending.run()
            mark()
        x.grad = None
        return [end - start for start, end in itertools.pairwise(marks)]

    def held_bytes(self, x: Tensor, grad: Tensor) -> tuple[int, int]:
        """Return what is allocated after F, and after I without the input's gradient."""
        assert self._engine is not None
        start = allocated_bytes()
        forward = self._engine.forward(x)
        after_forward = allocated_bytes() - start
        _, pending = forward.backward_input(grad)
        after_input = allocated_bytes() - start - x.nbytes
        pending.run()
        return after_forward, after_input


def check_equal(eager: nn.Module, opaque: nn.Module, x: Tensor, grad: Tensor) -> None:
    """Raise an error unless the engine gives both modules the gradients of plain autograd."""
    eager(x).backward(grad)
    SplitEngine(opaque).forward(x).backward(grad)
    for (name, expected), found in zip(eager.named_parameters(), opaque.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)
    x.grad = None


def measure_halves(width: int, unit: str, rounds: int) -> dict[str, Any]:
    batch, tokens, _ = SIZES[width]
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
    entrants = {
        WHOLE: Halves(compile_all(blocks, torch.compile, unit), is_split=False),
        SPLIT: Halves(compile_all(blocks, penstock.compile, unit), is_split=True),
        EAGER: Halves(blocks, is_split=True),
        OPAQUE: Halves(opaque_blocks(blocks, width), is_split=True),
    }
    x = torch.randn(batch, tokens, width, requires_grad=True)
    grad = torch.randn_like(x)
    check_equal(entrants[EAGER].module, entrants[OPAQUE].module, x, grad)
    times: dict[str, list[list[float]]] = {who: [] for who in entrants}
    warm_up = max(3, rounds // 10)
    names = list(entrants)
    for number in range(warm_up + rounds):
        for offset in range(len(names)):
            who = names[(number + offset) % len(names)]
            sample = entrants[who].run(x, grad)
            if number >= warm_up:
                times[who].append(sample)

    def ratio(above: str, below: str) -> Quartiles:
        return contenders.quartiles(
            [(a[1] + a[2]) / (b[1] + b[2]) for a, b in zip(times[above], times[below], strict=True)]
        )

    def share(who: str) -> float:
        return statistics.median(w / (i + w) for _, i, w in times[who])

    after_forward, after_input = entrants[SPLIT].held_bytes(x, grad)
    return {
        "width": width,
        "unit": unit,
        "backward_ms": statistics.median(i + w for _, i, w in times[WHOLE]) * 1e3,
        "split_over_whole": ratio(SPLIT, WHOLE),
        "split_over_eager": ratio(SPLIT, EAGER),
        "weight_share": share(SPLIT),
        "weight_share_eager": share(EAGER),
        "weight_share_opaque": share(OPAQUE),
        "after_input_over_after_forward": after_input / after_forward,
    }


def halves(quick: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    keep_freed_pages()
    found = []
    for width in [64] if quick else SIZES:
        for unit in ("blocks", "stage"):
            rounds = SIZES[width][2] // (5 if quick else 1)
            found.append(measure_halves(width, unit, rounds))
            print(json.dumps(found[-1]), flush=True)
    return found


STEPS = [
    (PENSTOCK, "1F1B", True),
    (PENSTOCK, "Interleaved1F1B", True),
    (PENSTOCK, "ZB-V", True),
    (PENSTOCK, "ZB-V", False),
    (TORCH, "1F1B", True),
    (TORCH, "Interleaved1F1B", True),
    (TORCH, "InterleavedZeroBubble", True),
    (TORCH, "ZB-V", True),
]
RANKS, STEP_BLOCKS, MICROBATCHES = 2, 8, 8


def run_steps(width: int, rounds: int) -> dict[str, Any]:
    """Run all contenders on this rank; those that fail are left out, and why is kept."""
    batch, tokens, _ = SIZES[width]
    warnings.simplefilter("ignore")
    torch.manual_seed(STEP_BLOCKS)
    x = torch.randn(MICROBATCHES * batch, tokens, width)
    target = torch.randn_like(x)
    entrants, failed = [], {}
    for library, schedule, is_compiled in STEPS:
        compiler = penstock.compile if library == PENSTOCK else torch.compile
        name = f"{schedule}, {'compiled' if is_compiled else 'eager'}"

        def make(stage: int, count: int, compiler: Any = compiler, on: bool = is_compiled) -> Any:
            per_stage = STEP_BLOCKS // count
            made = []
            for number in range(stage * per_stage, (stage + 1) * per_stage):
                torch.manual_seed(number)
                made.append(Block(width))
            return nn.Sequential(*map(compiler, made)) if on else nn.Sequential(*made)

        try:
            entrant = contenders.enter(
                Contender(library, schedule), MICROBATCHES, make, nn.functional.mse_loss
            )
            assert entrant is not None  # Every schedule has this shape.
            entrant.step(x, target)
        except Exception as error:  # What a library refuses is a result.
            failed[f"{library} {name}"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        else:
            entrants.append(replace(entrant, contender=Contender(library, name)))
    samples = contenders.run_rounds(
        entrants,
        lambda entrant: contenders.time_step(entrant, x, target, lead_in=1),
        title=f"width {width}",
        warm_up=2,
        rounds=rounds,
    )
    times = {" ".join(who): contenders.step_times(ranks) for who, ranks in samples.items()}
    base = times[f"{PENSTOCK} ZB-V, compiled"]
    return {
        "width": width,
        "step_ms": {who: statistics.median(each) * 1e3 for who, each in times.items()},
        "over_compiled_zb_v": {
            who: contenders.quartiles([a / b for a, b in zip(each, base, strict=True)])
            for who, each in times.items()
        },
        "failed": failed,
    }


def steps(quick: bool) -> list[dict[str, Any]]:
    found = []
    for width, rounds in [(64, 20)] if quick else [(64, 60), (256, 20)]:
        found.append(run_ranks(run_steps, RANKS, width, rounds, timeout_s=1500, pin_to_cores=True))
        print(json.dumps(found[-1]), flush=True)
    return found


_COMPILE = """
import sys, time, torch
sys.path.append({folder!r})
from split_backward.model import Block
import penstock
from penstock.backward import SplitEngine
torch.set_num_threads(1)
block, x = Block(64), torch.randn(1, 16, 64, requires_grad=True)
start_s = time.perf_counter()
if {ours}:
    _, pending = SplitEngine(penstock.compile(block)).forward(x).backward_input(torch.ones_like(x))
    pending.run()
else:
    torch.compile(block)(x).backward(torch.ones_like(x))
print(time.perf_counter() - start_s)
"""


def compiler(quick: bool) -> list[dict[str, Any]]:
    """Compile one block, in new processes: with an empty cache, and then with what it left."""
    found = []
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as cache:
            code = _COMPILE.format(folder=str(Path(__file__).parents[1]), ours=ours)
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
            times = [
                float(
                    subprocess.run(
                        [sys.executable, "-c", code],
                        env=env,
                        capture_output=True,
                        text=True,
                        check=True,
                        timeout=900,
                    ).stdout
                )
                for _ in range(2)
            ]
        who = "penstock.compile" if ours else "torch.compile"
        found.append({"who": who, "cold_s": times[0], "warm_s": times[1]})
        print(json.dumps(found[-1]), flush=True)
    return found


EXPERIMENTS = {"halves": halves, "steps": steps, "compiler": compiler}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", nargs="*", default=list(EXPERIMENTS), help="which to run")
    parser.add_argument("--quick", action="store_true", help="few rounds, the small width only")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    if unknown := set(options.experiments) - EXPERIMENTS.keys():
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(EXPERIMENTS)}")
    record: dict[str, Any] = {"environment": environment()}
    if options.save:
        with contextlib.suppress(FileNotFoundError):
            record = {**json.loads(options.save.read_text()), **record}
    for name in options.experiments:
        record[name] = EXPERIMENTS[name](options.quick)
        if options.save:
            options.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

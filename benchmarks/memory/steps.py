"""The steps that are measured: a transformer of 8 blocks, plain or checkpointed."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import TORCH, Contender, Entrant
from memory.live_bytes import ACTION, LiveBytes, count_live_bytes
from split_backward.model import Size, Stage

import penstock
from penstock.ir import Backward, BackwardInput, BackwardWeight, Forward, Overlap
from penstock.ir.action import compute_parts

BLOCKS, BATCH, TOKENS = 8, 2, 64
WARM_UP, COUNTED = 2, 2


@dataclass(frozen=True)
class Setting:
    ranks: int
    width: int
    microbatches: int
    is_checkpointed: bool


def make_stage(setting: Setting, stage: int, count: int) -> nn.Module:
    torch.manual_seed(stage)
    blocks = BLOCKS // count
    size = Size(blocks, setting.width, BATCH, TOKENS, 0, is_checkpointed=setting.is_checkpointed)
    return Stage(size)


def make_batch(setting: Setting) -> tuple[Tensor, Tensor]:
    torch.manual_seed(BLOCKS)
    x = torch.randn(setting.microbatches * BATCH, TOKENS, setting.width)
    return x, torch.randn_like(x)


def enter(
    contender: Contender, setting: Setting, schedule: penstock.Schedule | None = None
) -> Entrant | None:
    make = partial(make_stage, setting)
    loss_fn = nn.functional.mse_loss
    return contenders.enter(contender, setting.microbatches, make, loss_fn, schedule=schedule)


def warm_up(entrant: Entrant, x: Tensor, target: Tensor) -> None:
    """Afterwards ranks are connected, and every parameter has a gradient, which is added to."""
    with contenders.chosen_link(entrant.contender):
        for _ in range(WARM_UP):
            entrant.step(x, target)
    entrant.check_gradients()


def count_steps(entrant: Entrant, x: Tensor, target: Tensor) -> LiveBytes:
    """Count several steps together: what one keeps for the next is live in the next.

    The profiler is shown where each action of Penstock's begins and ends.
    """

    def run_marked(action: Any, context: Any) -> None:
        for part in compute_parts(action):  # Both halves of an overlap.
            with torch.profiler.record_function(f"{ACTION}{part}"):
                context.run(part)

    def run_steps() -> None:
        for _ in range(COUNTED):
            entrant.step(x, target)

    if entrant.contender.library != TORCH:
        for kind in (Forward, Backward, BackwardInput, BackwardWeight, Overlap):
            entrant.pipeline.register_custom_function(kind, run_marked)
    dist.barrier()
    return count_live_bytes(run_steps)

"""What a run will need, before it begins: the bubble, and the memory of each rank."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock import schedules
from penstock.costs import CostTable
from penstock.costs.amounts import to_amount
from penstock.costs.units import in_memory
from penstock.cutting import CutModel, LayerCost
from penstock.cutting.counted_stages import count_stages
from penstock.errors import OptionError
from penstock.ir import Rank, Schedule
from penstock.sim import simulate
from penstock.training.orders import Orders
from penstock.training.settings import TrainConfig
from penstock.training.token_loss import next_token_loss

_STATES = 2  # Of AdamW, for each parameter.
LOGGER = logging.getLogger("penstock")
_ASSUMED = "ZB-V"  # For the schedule that "auto" has yet to find.


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that a rank is expected to hold, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        return (
            f"{in_memory(self.total, 'bytes')}: weights {in_memory(self.weights, 'bytes')}, "
            f"gradients {in_memory(self.gradients, 'bytes')}, optimizer "
            f"{in_memory(self.optimizer, 'bytes')}, activations "
            f"{in_memory(self.activations, 'bytes')}"
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """The bubble and memory of a run, as far as shapes tell them."""

    ranks: tuple[RankMemory, ...]
    """Of one pipeline; Python and torch themselves need some hundred MiB more."""
    bubble: float | None
    """Simulated with the operations of each stage; None if they could not be counted."""

    @property
    def fullest(self) -> Rank:
        """The rank that is expected to hold the most."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    def __str__(self) -> str:
        bubble = "not counted" if self.bubble is None else f"{self.bubble:.1%}"
        return (
            f"expected: bubble {bubble}; rank {self.fullest}, the fullest, holds "
            f"{self.ranks[self.fullest]}"
        )


def forecast(
    config: TrainConfig,
    orders: Orders,
    pieces: CutModel,
    mb_inputs: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    target: Tensor,
) -> Forecast:
    """Count what the stages of a model and its loss need; they may be on the meta device.

    `mb_inputs` and `target` are those of one microbatch.
    """
    schedule = orders.schedule or _assumed_schedule(orders)
    counted = _count(pieces, *mb_inputs, target)
    bubble, activations = None, [0.0] * config.num_ranks
    if schedule is not None and counted:
        third = [cost.time / 3 for cost in counted]
        extra = [cost.backward_bytes for cost in counted]
        costs = CostTable(
            forward=third,
            backward_input=third,
            backward_weight=third,
            after_forward=[cost.activation_bytes for cost in counted],
            during_input=extra,
            during_backward=extra,
        )
        report = simulate(schedule, costs)
        bubble = report.bubble_by_makespan
        activations = [rank.peak_memory for rank in report.ranks]
    ranks = []
    for rank in range(config.num_ranks):
        modules = [pieces.get_stage_module(stage) for stage in orders.placement.stages_of(rank)]
        parameters = [p for module in modules for p in module.parameters()]
        buffers = sum(b.nbytes for module in modules for b in module.buffers())
        weights = sum(p.nbytes for p in parameters) / config.shards
        trained = sum(p.nbytes for p in parameters if p.requires_grad) / config.shards
        if config.evaluate_only:
            trained = 0.0
        ranks.append(RankMemory(weights + buffers, trained, _STATES * trained, activations[rank]))
    return Forecast(tuple(ranks), bubble if orders.schedule is not None else None)


def check_fits(config: TrainConfig, found: Forecast, device: torch.device) -> None:
    """Raise an error if a rank is expected to hold more than it may, or than there is."""
    if config.force:
        return
    fullest = found.ranks[found.fullest]
    if config.memory:
        cap = to_amount("--memory", config.memory)
        if fullest.total > cap:
            raise _too_large(found, f"--memory is {config.memory}")
        return
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        if fullest.total > free:
            raise _too_large(found, f"its device has {in_memory(free, 'bytes')} free")
        return
    available = _available()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", config.num_processes))
    needed = sum(rank.total for rank in found.ranks) * here / len(found.ranks)
    if available is not None and needed > available:
        raise _too_large(
            found,
            f"{here} ranks would need {in_memory(needed, 'bytes')} together, and this machine has "
            f"{in_memory(available, 'bytes')} free",
        )


def _too_large(found: Forecast, why: str) -> OptionError:
    return OptionError(
        f"the training is expected not to fit: rank {found.fullest} would hold "
        f"{found.ranks[found.fullest]}, but {why}. Give more --ranks, --shards or --microbatches, "
        "a smaller --batch or --context, --dtype bfloat16 or --schedule V-Min; or --force to try."
    )


def _count(
    pieces: CutModel, mb_args: tuple[Any, ...], mb_kwargs: dict[str, Any], target: Tensor
) -> Sequence[LayerCost]:
    """Return what each stage costs; nothing if that cannot be counted."""
    try:
        return count_stages(pieces, mb_args, mb_kwargs, loss_fn=next_token_loss, target=target)
    except Exception as error:  # It is the model's own, which may train all the same.
        LOGGER.warning("the forecast does not count operations and activations: %r", error)
        return ()


def _assumed_schedule(orders: Orders) -> Schedule | None:
    placement = orders.placement
    made = schedules.get(_ASSUMED)(
        num_ranks=placement.num_ranks, num_microbatches=orders.num_microbatches
    )
    return made if made.placement == placement else None


def _available() -> float | None:
    """Return the bytes that programs can still get, if the system says so."""
    if sys.platform != "linux":
        return None
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return None

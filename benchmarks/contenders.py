"""Pipelines to compare: each is a library with a schedule, and all are built and run alike."""

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import penstock
from penstock.ir.action import compute_parts

TORCH, PENSTOCK = "torch", "penstock"
PENSTOCK_GLOO = "penstock over gloo"
"""Penstock without shared memory: over gloo, as torch is."""
SWITCH = "PENSTOCK_SHARED_MEMORY"
SCHEDULES = [name for name in penstock.schedules.names() if name != "ForwardOnly"]

# torch's class for each schedule that both libraries have.
TORCH_CLASSES = {
    "GPipe": torch_pipelining.ScheduleGPipe,
    "1F1B": torch_pipelining.Schedule1F1B,
    "Interleaved1F1B": torch_pipelining.ScheduleInterleaved1F1B,
    "LoopedBFS": torch_pipelining.ScheduleLoopedBFS,
    "InterleavedZeroBubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "ZB-V": torch_pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": torch_pipelining.ScheduleDualPipeV,
}

MakeModule = Callable[[int, int], nn.Module]
"""The module of a stage, by its number and by the number of stages."""

LossFn = Callable[[Tensor, Tensor], Tensor]


class Contender(NamedTuple):
    library: str
    schedule: str


class Sample(NamedTuple):
    """One step on one rank: clock at its start and end, and processor time if it was taken."""

    start_s: float
    end_s: float
    cpu_s: float = 0.0
    plain_cpu_s: float = 0.0


Samples = dict[Contender, list[list[Sample]]]
"""For each contender that took part, for each rank, a sample per round."""


@dataclass(frozen=True)
class Entrant:
    """A contender on this rank, ready to step."""

    contender: Contender
    modules: Sequence[nn.Module]
    pipeline: Any
    has_first: bool
    has_last: bool

    def step(self, x: Tensor, target: Tensor) -> list[Tensor]:
        """The losses of the microbatches, on the rank that holds the last stage."""
        losses: list[Tensor] = []
        inputs = (x,) if self.has_first else ()
        ends = {"target": target, "losses": losses} if self.has_last else {}
        self.pipeline.step(*inputs, **ends, return_outputs=False)
        return losses

    def forget_gradients(self) -> None:
        for module in self.modules:
            module.zero_grad(set_to_none=True)

    def check_gradients(self) -> None:
        """Raise if a parameter has no gradient: then work was left out."""
        for module in self.modules:
            for name, param in module.named_parameters():
                if param.grad is None:
                    raise RuntimeError(f"{self.contender}: {name} has no gradient after a step.")


def make_schedule(name: str, p: int, m: int) -> penstock.Schedule | None:
    """The schedule, or None if there is none of this shape."""
    try:
        return penstock.schedules.get(name)(num_ranks=p, num_microbatches=m)
    except penstock.errors.ScheduleError:
        return None


def list_contenders(
    names: Iterable[str], libraries: Sequence[str] = (TORCH, PENSTOCK)
) -> list[Contender]:
    """List the libraries with each schedule, as far as they have it."""
    every = [Contender(library, name) for name in names for library in libraries]
    return [
        contender
        for contender in every
        if contender.library != TORCH or contender.schedule in TORCH_CLASSES
    ]


@contextmanager
def chosen_link(contender: Contender) -> Iterator[None]:
    """Let the contender connect by its own link: build it, and take its first step, in here."""
    before = os.environ.get(SWITCH)
    if contender.library == PENSTOCK_GLOO:
        os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before


def enter(
    contender: Contender,
    m: int,
    make_module: MakeModule,
    loss_fn: LossFn,
    *,
    schedule: penstock.Schedule | None = None,
) -> Entrant | None:
    """Build the contender's stages on this rank; None if it takes no such shape.

    The schedule is the registered one of its name, unless it is given.
    """
    if schedule is None:
        schedule = make_schedule(contender.schedule, dist.get_world_size(), m)
    if schedule is None:
        return None
    count = schedule.placement.num_stages
    held = schedule.placement.stages_of(dist.get_rank())
    modules = [make_module(stage, count) for stage in held]
    library = torch_pipelining if contender.library == TORCH else penstock
    stages = [
        library.PipelineStage(module, stage, count, torch.device("cpu"))
        for module, stage in zip(modules, held, strict=True)
    ]
    if contender.library == TORCH:
        pipeline = _torch_pipeline(contender.schedule, stages, m, loss_fn)
    else:
        with chosen_link(contender):
            pipeline = penstock.Pipeline(stages, schedule, loss_fn=loss_fn)
    if pipeline is None:
        return None
    return Entrant(contender, modules, pipeline, 0 in held, count - 1 in held)


def _torch_pipeline(name: str, stages: list[Any], m: int, loss_fn: LossFn) -> Any:
    kind = TORCH_CLASSES[name]
    try:
        if issubclass(kind, PipelineScheduleSingle):
            return kind(stages[0], m, loss_fn=loss_fn)
        return kind(stages, m, loss_fn=loss_fn)
    except ValueError:  # The shape: torch finds this out alike on every rank.
        return None


def time_step(entrant: Entrant, x: Tensor, target: Tensor, *, lead_in: int = 0) -> Sample:
    """One step from a barrier on, behind `lead_in` steps that are not timed, as in training."""
    gc.collect()
    for _ in range(lead_in):
        entrant.step(x, target)
    entrant.forget_gradients()
    x.grad = None
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    entrant.step(x, target)
    end_s, end_cpu_s = time.perf_counter(), time.process_time()
    return Sample(start_s, end_s, end_cpu_s - start_cpu_s)


def run_rounds(
    entrants: list[Entrant],
    take_sample: Callable[[Entrant], Sample],
    *,
    title: str,
    warm_up: int,
    rounds: int,
) -> Samples:
    """In each round every entrant runs once; the order turns round from one to the next."""
    mine: dict[Contender, list[Sample]] = {entrant.contender: [] for entrant in entrants}
    for number in range(1 - warm_up, rounds + 1):
        if number == 1:  # What stays for good is not searched again and again.
            gc.collect()
            gc.freeze()
        for entrant in entrants if number % 2 else reversed(entrants):
            sample = take_sample(entrant)
            if number >= 1:
                mine[entrant.contender].append(sample)
            else:
                entrant.check_gradients()
        if dist.get_rank() == 0:
            what = f"round {number} of {rounds}" if number >= 1 else "warm-up"
            print(f"{title}: {what}", file=sys.stderr, flush=True)
    return _gather(mine)


def _gather(mine: dict[Contender, list[Sample]]) -> Samples:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {contender: [theirs[contender] for theirs in everyone] for contender in mine}


def step_times(ranks: list[list[Sample]]) -> list[float]:
    """Seconds of each round's step: from the first start to the last end over all ranks.

    The ranks' clocks are one clock: Linux counts perf_counter from when the machine started.
    """
    return [
        max(sample.end_s for sample in step) - min(sample.start_s for sample in step)
        for step in zip(*ranks, strict=True)
    ]


def count_actions(schedule: penstock.Schedule) -> int:
    """Compute actions of all ranks, a pair counting as two."""
    return sum(len(compute_parts(action)) for order in schedule.orders for action in order)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high

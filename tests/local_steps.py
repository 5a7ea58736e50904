"""Steps of a pipeline whose ranks are in this process, and the same steps of the model unsplit.

All ranks share the modules that a test has made, so that it can look at them afterwards.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock
from fuzzing import IS_LONG
from penstock import LocalGroup, Pipeline, Schedule, schedules
from stage_training import assert_close, assert_same_grads, make_stages
from staged_models import Batch, MLPStage, StepRecord, named_grads, run_unsplit

NUM_STAGES = 4
NUM_MICROBATCHES = 4
WIDTH = 6

# One of each kind: full backwards, split ones, both with overlaps; all with four stages.
FOUR_STAGES = {
    name: schedules.get(name)(num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
    for name, num_ranks in {"1F1B": 4, "ZB-H1": 4, "ZB-V": 2, "DualPipeV": 2}.items()
}

# Full backwards alone, and a schedule that has all: full and split ones, and overlaps.
FULL_AND_SPLIT = {
    name: schedule
    for name, schedule in FOUR_STAGES.items()
    if IS_LONG or name in ("1F1B", "DualPipeV")
}

PipelineMaker = Callable[..., Pipeline]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp(num_stages: int = NUM_STAGES) -> list[nn.Module]:
    return [MLPStage().double() for _ in range(num_stages)]


def mlp_batch(size: int = 2 * NUM_MICROBATCHES) -> Batch:
    return Batch((randn(size, WIDTH),), {}, randn(size, WIDTH))


def mean_square(outputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, target)


def run_locally(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    main: Callable[[Pipeline], Any],
    *,
    stage_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """Call `main` on each rank with its pipeline; returns what they returned."""

    def on_rank(group: LocalGroup) -> Any:
        held = schedule.placement.stages_of(group.rank)
        stages = make_stages(group, modules, held, **stage_options or {})
        return main(Pipeline(stages, schedule, **{"loss_fn": mean_square, **options}))

    return penstock.local_ranks(schedule.num_ranks, on_rank)


def step_locally(
    modules: Sequence[nn.Module], schedule: Schedule, batch: Batch, **options: Any
) -> StepRecord:
    """One step from no gradients: what it gave, of all ranks together."""

    def main(pipeline: Pipeline) -> tuple[Any, list[Tensor]]:
        losses: list[Tensor] = []
        outputs = pipeline.step(*batch.args, target=batch.target, losses=losses, **batch.kwargs)
        return outputs, losses

    zero_grad(modules)
    results = run_locally(modules, schedule, main, **options)
    outputs, losses = next((result for result in results if result[1]), (None, []))
    return StepRecord(outputs, losses, grads_of(modules))


def step_unsplit(
    modules: Sequence[nn.Module], batch: Batch, loss_fn: Callable[..., Tensor] = mean_square
) -> StepRecord:
    """The same of a copy of the model, which gets the whole batch at once."""
    # Copied together, so that what they share stays shared.
    copies = list(copy.deepcopy(nn.ModuleList(modules)))
    zero_grad(copies)
    outputs = run_unsplit(copies, batch.args, batch.kwargs)
    loss = loss_fn(outputs, batch.target)
    if loss.requires_grad:
        loss.backward()
    outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
    return StepRecord(outputs, [loss.detach()], grads_of(copies))


def assert_same(expected: StepRecord, actual: StepRecord) -> None:
    """For a loss that is a mean: that of the batch is the mean over its microbatches."""
    assert_close("outputs", expected.outputs, actual.outputs)
    assert_close("loss", expected.losses[0], torch.stack(actual.losses).mean())
    assert_same_grads("step", expected.grads, [actual.grads])


def grads_of(modules: Sequence[nn.Module]) -> dict[str, Tensor | None]:
    return named_grads(dict(enumerate(modules)))


def zero_grad(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        module.zero_grad()

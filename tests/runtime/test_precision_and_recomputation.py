"""Steps under autocast, with checkpointing, and with compiled stages."""

import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzzing import rotated
from local_steps import (
    FOUR_STAGES,
    FULL_AND_SPLIT,
    NUM_MICROBATCHES,
    NUM_STAGES,
    assert_same,
    grads_of,
    mean_square,
    mlp,
    mlp_batch,
    run_locally,
    step_locally,
    step_unsplit,
    zero_grad,
)
from penstock import Pipeline, Schedule
from stage_training import split
from staged_models import MODELS, Batch, MLPStage, run_unsplit

every_schedule = rotated(schedule=FULL_AND_SPLIT)

# A bfloat16 has 8 bits. The reference rounds at the same places but for the weight gradients,
# which a split backward may keep in float32 where autograd rounds each microbatch's to bfloat16:
# 2**-8 of the largest value that is added up, and there are four.
BFLOAT16_TOLERANCE = 4 * 2**-8


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


class Float32Head(nn.Module):
    """A block that is kept in float32, as heads and norms often are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y: Tensor = torch.tanh(self.layer(x.float()))
            return y


def step_under_autocast(
    modules: Sequence[nn.Module], schedule: Schedule, batch: Batch
) -> tuple[Tensor, dict[str, Tensor | None]]:
    def main(pipeline: Pipeline) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(2):
                zero_grad([stage.submod for stage in pipeline.stages.values()])
                outputs = pipeline.step(*batch.args, target=batch.target)
        return outputs

    results = run_locally(modules, schedule, main)
    (outputs,) = (outputs for outputs in results if outputs is not None)
    return outputs, grads_of(modules)


def loop_under_autocast(
    modules: Sequence[nn.Module], batch: Batch, *, retain_graph: bool = False
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The same microbatches one after the other, through the unsplit model."""
    zero_grad(modules)
    outputs = []
    parts = (split(value, NUM_MICROBATCHES) for value in (batch.args[0], batch.target))
    for x, target in zip(*parts, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(run_unsplit(modules, (x,), {}))
            loss = mean_square(outputs[-1], target) / NUM_MICROBATCHES
        loss.backward(retain_graph=retain_graph)
    return torch.cat(outputs).detach(), grads_of(modules)


@every_schedule
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_autocast_around_the_step_gives_what_a_loop_over_microbatches_gives(
    is_checkpointed: bool, schedule: Schedule
) -> None:
    modules: list[nn.Module] = [MLPStage() for _ in range(NUM_STAGES)]
    if is_checkpointed:
        modules = [Checkpointed(module) for module in modules]
    batch = Batch((torch.randn(8, 6),), {}, torch.randn(8, 6))
    outputs, actual = step_under_autocast(modules, schedule, batch)
    expected_outputs, expected = loop_under_autocast(modules, batch)
    assert torch.equal(expected_outputs, outputs), "forwards are the same products"
    for name, grad in expected.items():
        assert grad is not None
        atol = BFLOAT16_TOLERANCE * grad.abs().max().item()
        torch.testing.assert_close(actual[name], grad, rtol=0, atol=atol, msg=name)


@every_schedule
def test_part_that_opts_out_of_autocast_has_gradients_in_full_precision(
    schedule: Schedule,
) -> None:
    """The weight half runs later, under the autocast of the step: it computed in bfloat16."""
    modules: list[nn.Module] = [Float32Head() for _ in range(NUM_STAGES)]
    batch = Batch((torch.randn(8, 6),), {}, torch.randn(8, 6))
    _, actual = step_under_autocast(modules, schedule, batch)
    _, expected = loop_under_autocast(modules, batch)
    for name, grad in expected.items():
        # The order of additions differs, each off by 6e-8; bfloat16 would be off by 4e-3.
        torch.testing.assert_close(actual[name], grad, rtol=1e-5, atol=1e-6, msg=name)


@every_schedule
def test_graph_behind_the_arguments_has_gradients_in_its_own_precision(
    schedule: Schedule,
) -> None:
    """The backward through it is at the end of the step, under the step's autocast."""
    modules: list[nn.Module] = [Float32Head() for _ in range(NUM_STAGES)]
    outside = nn.Linear(6, 6)
    x, target = torch.randn(8, 6), torch.randn(8, 6)
    loop_under_autocast(modules, Batch((outside(x),), {}, target), retain_graph=True)
    expected = outside.weight.grad
    outside.zero_grad()
    zero_grad(modules)
    given = outside(x)

    def main(pipeline: Pipeline) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipeline.step(given, target=target)

    run_locally(modules, schedule, main)
    # As above: float32, in another order.
    torch.testing.assert_close(outside.weight.grad, expected, rtol=1e-5, atol=1e-6)


@every_schedule
@pytest.mark.parametrize("model_name", ["mlp", "transformer"])
def test_checkpointed_blocks_train_as_unsplit(model_name: str, schedule: Schedule) -> None:
    model = MODELS[model_name]
    plain = [model.stage(index, NUM_STAGES) for index in range(NUM_STAGES)]
    modules: list[nn.Module] = [Checkpointed(module) for module in plain]
    batch, loss_fn = model.batch(8, 0), model.loss_fn("mean")
    expected = step_unsplit(plain, batch, loss_fn)
    actual = step_locally(modules, schedule, batch, loss_fn=loss_fn)
    actual.grads = {name.replace("block.", "", 1): grad for name, grad in actual.grads.items()}
    assert_same(expected, actual)


@every_schedule
def test_part_of_a_stage_is_checkpointed(schedule: Schedule) -> None:
    modules: list[nn.Module] = [
        nn.Sequential(MLPStage(), Checkpointed(MLPStage()), MLPStage()).double()
        for _ in range(NUM_STAGES)
    ]
    batch = mlp_batch()
    assert_same(step_unsplit(modules, batch), step_locally(modules, schedule, batch))


@pytest.mark.parametrize("name", ["ZB-V", "ZB-H1", "DualPipeV"])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_stage_compiled_by_torch_warns_and_is_right(name: str, is_in_place: bool) -> None:
    modules, batch = mlp(), mlp_batch()
    expected = step_unsplit(modules, batch)
    wrapped: list[nn.Module] = list(modules)
    if is_in_place:
        modules[1].compile(backend="aot_eager")
    else:
        wrapped[1] = torch.compile(modules[1], backend="aot_eager")  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = step_locally(wrapped, FOUR_STAGES[name], batch)
    ours = [str(w.message) for w in caught if "compiled" in str(w.message)]
    assert 1 == len(ours)
    expected_text = (
        "it was compiled by torch.compile, whose backward cannot be split. The gradients of its "
        "weights are computed in the input backward, so bubbles stay idle. Use penstock.compile "
        "in place of torch.compile."
    )
    assert re.fullmatch(rf"stage 1 on rank \d: {expected_text}", ours[0])
    actual.grads = {name.replace("_orig_mod.", ""): g for name, g in actual.grads.items()}
    assert_same(expected, actual)


@pytest.mark.parametrize(("schedule", "backend"), [("1F1B", "aot_eager"), ("ZB-V", "eager")])
def test_compiled_stage_that_loses_nothing_does_not_warn(schedule: str, backend: str) -> None:
    """It is not split, or it is compiled to plain operations."""
    modules, batch = mlp(), mlp_batch()
    expected = step_unsplit(modules, batch)
    modules[1].compile(backend=backend)
    assert_same(expected, step_locally(modules, FOUR_STAGES[schedule], batch))

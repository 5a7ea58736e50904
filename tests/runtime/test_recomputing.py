"""Forwards that keep only their inputs and run again before their backwards.

Whatever a step gives, changes or leaves behind is the same to the last bit.
"""

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fuzzing import rotated
from local_steps import (
    FOUR_STAGES,
    NUM_STAGES,
    WIDTH,
    grads_of,
    mean_square,
    mlp,
    mlp_batch,
    randn,
    run_locally,
    step_locally,
)
from penstock import Pipeline, Schedule, schedules
from penstock.errors import CommError, StageError
from penstock.ir import Backward, Recompute
from recomputed_steps import assert_same_bits, recomputed, train
from repeated_blocks import BLOCKS, Block, autocast_inside, in_place, popping, unchanged
from stage_training import TRAINING_NAMES, Run
from staged_models import MODELS, Batch, MLPStage

KINDS = ["all", "some", "early"]


def check(
    modules: list[nn.Module],
    schedule: Schedule,
    batch: Batch | None = None,
    kinds: list[str] = KINDS,
    **options: Any,
) -> None:
    batch = batch or mlp_batch()
    expected = train(modules, schedule, batch, **options)
    for kind in kinds:
        again = recomputed(schedule)[kind]
        again.verify()
        assert_same_bits(expected, train(modules, again, batch, **options))


@rotated(name=TRAINING_NAMES, model=list(MODELS), kind=KINDS)
def test_registered_schedule_gives_the_same(name: str, model: str, kind: str) -> None:
    run = Run(model, name, 2)
    shape, made = run.shape, MODELS[model]
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=shape.m)
    modules = [made.stage(index, run.num_stages) for index in range(run.num_stages)]
    batch = made.batch(run.batch_size, 0)
    check(modules, schedule, batch, [kind], loss_fn=made.loss_fn(run.reduction))


@rotated(block=BLOCKS, schedule=FOUR_STAGES, kind=KINDS)
def test_stage_gives_and_changes_the_same(
    block: Callable[[], Block], schedule: Schedule, kind: str
) -> None:
    random.seed(0)
    np.random.seed(0)
    states = random.getstate(), np.random.get_state()
    # One that draws: ranks of one process share what they draw from.
    modules = [*mlp(1), block().double(), *mlp(2)]
    batch = mlp_batch()
    expected = train(modules, schedule, batch)
    random.setstate(states[0])
    np.random.set_state(states[1])
    assert_same_bits(expected, train(modules, recomputed(schedule)[kind], batch))


def test_modules_may_be_told_to_train_between_steps() -> None:
    """What forwards change was once looked at in the first step alone."""
    block, batch = BLOCKS["batch norm"]().double(), mlp_batch()
    modules = [*mlp(1), block.eval(), *mlp(2)]
    found = []
    for schedule in (FOUR_STAGES["1F1B"], recomputed(FOUR_STAGES["1F1B"])["all"]):
        own = list(copy.deepcopy(nn.ModuleList(modules)))

        def main(pipeline: Pipeline) -> None:
            for is_training in (False, True):
                for stage in pipeline.stages.values():
                    stage.submod.train(is_training)
                pipeline.step(batch.args[0], target=batch.target)

        run_locally(own, schedule, main)
        found.append([grads_of(own), dict(own[1].named_buffers())])
    assert_same_bits(*found)


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_inputs_that_a_stage_changes_are_changed_once(schedule: Schedule, kind: str) -> None:
    modules: list[nn.Module] = [Block(in_place).double() for _ in range(NUM_STAGES)]
    x, target = mlp_batch().args[0], randn(8, WIDTH)
    check(modules, schedule, Batch((x,), {"mask": randn(8, WIDTH)}, target), [kind])


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_list_that_a_stage_empties_is_full_again(schedule: Schedule, kind: str) -> None:
    modules: list[nn.Module] = [Block(unchanged).double() for _ in range(NUM_STAGES)]
    for module in modules:
        module.function = lambda block, x, scales: popping(block, x, list(scales))  # type: ignore[assignment]
    modules[1].function = popping  # type: ignore[assignment]
    batch = Batch((randn(8, WIDTH),), {"scales": [randn(8, WIDTH) for _ in range(3)]}, None)
    check(modules, schedule, batch, [kind], loss_fn=lambda y, _: y.square().sum())


@rotated(schedule=FOUR_STAGES, kind=KINDS, frozen=[(0,), (1, 2), (0, 1), (3,)])
def test_frozen_stages(schedule: Schedule, kind: str, frozen: tuple[int, ...]) -> None:
    modules = mlp()
    for index in frozen:
        modules[index].requires_grad_(False)
    check(modules, schedule, kinds=[kind])


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_gradients_of_the_arguments(schedule: Schedule, kind: str) -> None:
    x = randn(8, WIDTH).requires_grad_()
    check(mlp(), schedule, Batch((x,), {}, randn(8, WIDTH)), [kind])


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_autocast_around_the_step_and_inside_of_stages(schedule: Schedule, kind: str) -> None:
    modules: list[nn.Module] = [MLPStage() for _ in range(NUM_STAGES)]
    modules[1] = Block(autocast_inside)
    batch = Batch((torch.randn(8, WIDTH),), {}, torch.randn(8, WIDTH))

    def around(step: Callable[[], Any]) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step()

    check(modules, schedule, batch, [kind], around=around)


class NoisyLoss(nn.Module):
    """A loss that draws, counts its calls, and depends on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        noisy = functional.dropout(outputs) * self.count * self.calls
        return mean_square(noisy, target)


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_loss_that_draws_and_counts(schedule: Schedule, kind: str) -> None:
    modules, batch = mlp(), mlp_batch()
    losses = [NoisyLoss(), NoisyLoss()]
    expected = train(modules, schedule, batch, loss_fn=losses[0])
    actual = train(modules, recomputed(schedule)[kind], batch, loss_fn=losses[1])
    assert_same_bits(expected, actual)
    assert losses[0].calls == losses[1].calls == losses[0].count == losses[1].count == 8


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_microbatches_that_differ_and_have_weights(schedule: Schedule, kind: str) -> None:
    batch = Batch((randn(9, WIDTH),), {}, randn(9, WIDTH))
    options = {"stage_options": {"dynamic_shapes": True}, "loss_weight": lambda target: len(target)}
    check(mlp(), schedule, batch, [kind], **options)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_forward_that_computes_gradients_is_refused(name: str) -> None:
    def with_gradients(block: Block, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(block.layer(own).square().sum(), own)
        return x + grad

    modules = [Block(with_gradients).double(), *mlp(3)]
    with pytest.raises(StageError, match="the forward computes gradients, so it needs what"):
        train(modules, recomputed(FOUR_STAGES[name])["all"], mlp_batch())


def test_weights_that_a_forward_changes_are_refused() -> None:
    def clamping(block: Block, x: Tensor) -> Tensor:
        with torch.no_grad():
            block.layer.weight.mul_(0.5)
        return x + block.layer(x)

    modules = [Block(clamping).double(), *mlp(3)]
    with pytest.raises(StageError, match=r"stage 0, microbatch 0: the forward changes a parameter"):
        train(modules, recomputed(FOUR_STAGES["1F1B"])["all"], mlp_batch())


def test_buffer_that_changes_in_some_forwards_only_is_refused() -> None:
    def sometimes(block: Block, x: Tensor) -> Tensor:
        block.calls += 1
        if block.calls > 2:
            block.count += 1
        return x + block.layer(x) * block.count

    modules = [Block(sometimes).double(), *mlp(3)]
    with pytest.raises(
        StageError,
        match=r"stage 0, microbatch 2: the forward has changed buffer 'count' in place, which the "
        "first forward of this step did not",
    ):
        train(modules, recomputed(FOUR_STAGES["1F1B"])["all"], mlp_batch())


def test_input_that_somebody_changes_before_the_recomputation_is_refused() -> None:
    def changing(block: Block, x: Tensor, mask: Tensor) -> Tensor:
        mask.add_(1)
        return x + block.layer(x) * mask.clone()

    def reading(block: Block, x: Tensor, mask: Tensor) -> Tensor:
        return x + block.layer(x) * mask.clone()

    blocks: list[nn.Module] = [Block(reading).double() for _ in range(3)]
    schedule = Schedule.from_csv("0F0,1F0,2F0,2B0,1B0,0R0,0B0\n")
    blocks[2].function = changing  # type: ignore[assignment]
    batch = Batch((randn(2, WIDTH),), {"mask": randn(2, WIDTH)}, randn(2, WIDTH))
    with pytest.raises(
        StageError, match=r"stage 0, microbatch 0: an input .* was changed in place between"
    ):
        train(blocks, schedule, batch)


def test_weights_that_change_before_the_recomputation_are_refused() -> None:
    def update(weight: Tensor) -> None:
        with torch.no_grad():
            weight.mul_(0.5)

    modules, batch = mlp(1), mlp_batch()
    modules[0].down.weight.register_post_accumulate_grad_hook(update)
    schedule = Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1\n")
    with pytest.raises(
        StageError, match=r"stage 0, microbatch 1: something has changed a parameter"
    ):
        step_locally(modules, schedule, batch)


def test_failure_inside_of_a_recomputation_leaves_the_stage_as_after_its_forward() -> None:
    calls: list[int] = []

    def failing(block: Block, x: Tensor) -> Tensor:
        calls.append(block.calls)
        block.calls += 1
        y: Tensor = functional.dropout(block.parts[0](block.layer(x)))
        if len(calls) == 3:
            raise ArithmeticError("in the second one")
        return x + y

    block = Block(failing, nn.BatchNorm1d(WIDTH)).double()
    left: list[Any] = []

    def after_forwards(action: Any, context: Any) -> None:
        left[:] = [torch.get_rng_state(), *(value.clone() for value in block.buffers())]
        context.run(action)

    def main(pipeline: Pipeline) -> None:
        pipeline.register_custom_function(Recompute, after_forwards)
        with pytest.raises(ArithmeticError, match="in the second one") as caught:
            pipeline.step(batch.args[0], target=batch.target)
        assert ["in 0R0 (recomputation of microbatch 0 on stage 0), on rank 0"] == (
            caught.value.__notes__
        )
        with pytest.raises(CommError, match="this pipeline has ended"):
            pipeline.step(batch.args[0], target=batch.target)

    batch = mlp_batch()
    run_locally([block], Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1\n"), main)
    assert [0, 1, 0] == calls
    assert 2 == block.calls
    assert_same_bits(left, [torch.get_rng_state(), *block.buffers()])


class Remember:
    """The tensors that a forward made, without holding them."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []

    def __call__(self, block: Block, x: Tensor) -> Tensor:
        hidden = block.layer(x)
        outputs = hidden.sin() * 2
        self.made += [weakref.ref(x), weakref.ref(hidden), weakref.ref(outputs)]
        return outputs


def test_only_inputs_are_alive_between_a_forward_and_its_recomputation() -> None:
    remember = Remember()
    modules: list[nn.Module] = [Block(remember).double(), *mlp(1)]
    alive: dict[str, list[bool]] = {}

    def look(action: Any, context: Any) -> None:
        alive[str(action)] = [ref() is not None for ref in remember.made]
        context.run(action)

    def main(pipeline: Pipeline) -> None:
        for kind in (Recompute, Backward):
            pipeline.register_custom_function(kind, look)
        pipeline.step(batch.args[0], target=batch.target, return_outputs=False)

    batch = mlp_batch(4)
    schedule = Schedule.from_csv("0F0,0F1,1F0,1B0,0R0,0B0,1F1,1B1,0R1,0B1\n")
    run_locally(modules, schedule, main)
    assert [True, False, False] * 2 == alive["0R0"]
    assert [True, True, True] == alive["0B0"][6:]
    assert [True, False, False] == alive["0R1"][3:6]

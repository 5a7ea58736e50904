"""What `step`, `eval` and `step_microbatches` take and return."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuzzing import rotated
from local_steps import (
    FULL_AND_SPLIT,
    NUM_MICROBATCHES,
    NUM_STAGES,
    WIDTH,
    assert_same,
    grads_of,
    mean_square,
    mlp,
    mlp_batch,
    randn,
    run_locally,
    step_locally,
    step_unsplit,
    zero_grad,
)
from penstock import (
    LocalGroup,
    Pipeline,
    PipelineStage,
    Replicate,
    Schedule,
    TensorChunkSpec,
    local_ranks,
)
from stage_training import CPU, assert_close, assert_same_grads, split
from staged_models import MODELS, Batch, StepRecord, run_unsplit

every_schedule = rotated(schedule=FULL_AND_SPLIT)


def summed_square(outputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, target, reduction="sum")


def transformer() -> list[nn.Module]:
    return [MODELS["transformer"].stage(index, NUM_STAGES) for index in range(NUM_STAGES)]


@every_schedule
def test_losses_are_those_of_each_microbatch_and_replace_what_was_there(
    schedule: Schedule,
) -> None:
    modules, batch = mlp(), mlp_batch()

    def main(pipeline: Pipeline) -> list[Any]:
        losses: list[Any] = ["left from before"]
        for run in (pipeline.step, pipeline.eval):
            run(*batch.args, target=batch.target, losses=losses)
            yielded.append(list(losses))
        return losses

    yielded: list[list[Any]] = []
    run_locally(modules, schedule, main)
    outputs = step_unsplit(modules, batch).outputs
    expected = list(map(mean_square, split(outputs, 4), split(batch.target, 4)))
    given = [losses for losses in yielded if losses]
    assert 2 == len(given)
    for losses in given:
        assert_close("losses", expected, losses)
        assert not any(loss.requires_grad for loss in losses)


@every_schedule
def test_losses_take_no_more_memory_than_their_values(schedule: Schedule) -> None:
    """On the CPU, mse_loss returns one value in the memory of all that it reduced.

    So the losses of a step kept as much as the outputs of all microbatches.
    """
    modules, batch = mlp(), mlp_batch()
    assert mean_square(*batch.args, batch.target).untyped_storage().nbytes() > 8

    def main(pipeline: Pipeline) -> list[Tensor]:
        losses: list[Tensor] = []
        found = []
        for run in (pipeline.step, pipeline.eval):
            run(*batch.args, target=batch.target, losses=losses)
            found += losses
        return found

    losses = [loss for found in run_locally(modules, schedule, main) for loss in found]
    assert [8] * 2 * NUM_MICROBATCHES == [loss.untyped_storage().nbytes() for loss in losses]


@every_schedule
def test_outputs_are_not_returned_if_nobody_wants_them(schedule: Schedule) -> None:
    modules, batch = mlp(), mlp_batch()

    def main(pipeline: Pipeline) -> list[Any]:
        options = {"target": batch.target, "return_outputs": False}
        cut = [(x,) for x in split(batch.args[0], NUM_MICROBATCHES)]
        targets = split(batch.target, NUM_MICROBATCHES)
        return [
            pipeline.step(*batch.args, **options),
            pipeline.eval(*batch.args, **options),
            pipeline.step_microbatches(cut, targets=targets, return_outputs=False),
        ]

    for results in run_locally(modules, schedule, main):
        assert [None, None, None] == results
    expected = step_unsplit(modules, batch).grads
    twice = {name: 2 * grad for name, grad in expected.items() if grad is not None}
    assert_same_grads("two steps", twice, [grads_of(modules)])


@every_schedule
def test_outputs_have_no_graph(schedule: Schedule) -> None:
    outputs = step_locally(mlp(), schedule, mlp_batch()).outputs
    assert not outputs.requires_grad


@every_schedule
def test_keyword_arguments_of_the_loss_are_given_whole(schedule: Schedule) -> None:
    modules, batch, weight = mlp(), mlp_batch(), torch.rand(NUM_MICROBATCHES, 1).double()

    def loss_fn(outputs: Tensor, target: Tensor, *, weight: Tensor, power: int) -> Tensor:
        assert NUM_MICROBATCHES == len(weight)
        return ((outputs - target) ** power * weight.mean()).mean()

    def main(pipeline: Pipeline) -> Any:
        return pipeline.step(
            *batch.args, target=batch.target, loss_kwargs={"weight": weight, "power": 4}
        )

    run_locally(modules, schedule, main, loss_fn=loss_fn)
    expected = step_unsplit(modules, batch, lambda y, t: loss_fn(y, t, weight=weight, power=4))
    assert_same_grads("step", expected.grads, [grads_of(modules)])


@every_schedule
@pytest.mark.parametrize("scales", [True, False])
def test_gradients_are_the_sum_over_microbatches_or_their_mean(
    scales: bool, schedule: Schedule
) -> None:
    modules, batch = mlp(), mlp_batch()
    actual = step_locally(modules, schedule, batch, loss_fn=summed_square, scale_grads=scales)
    expected = step_unsplit(modules, batch, summed_square)
    share = 1 / NUM_MICROBATCHES if scales else 1
    wanted = {name: grad * share for name, grad in expected.grads.items() if grad is not None}
    assert_same_grads("step", wanted, [actual.grads])
    assert_close("losses, which are not scaled", expected.losses[0], sum(actual.losses))


@every_schedule
def test_steps_add_up_until_gradients_are_cleared(schedule: Schedule) -> None:
    modules = mlp()
    batches = [mlp_batch() for _ in range(3)]

    def main(pipeline: Pipeline) -> None:
        for batch in batches:
            pipeline.step(*batch.args, target=batch.target)

    run_locally(modules, schedule, main)
    steps = [step_unsplit(modules, batch).grads for batch in batches]
    total = {name: sum(step[name] for step in steps) for name in steps[0]}  # type: ignore[misc]
    assert_same_grads("three steps", total, [grads_of(modules)])


@every_schedule
def test_batch_that_comes_cut_gives_outputs_that_are_not_merged(schedule: Schedule) -> None:
    model = MODELS["many"]
    modules = [model.stage(index, NUM_STAGES) for index in range(NUM_STAGES)]
    batch = model.batch(8, 0)
    parts = [split(value, NUM_MICROBATCHES) for value in batch]

    def main(pipeline: Pipeline) -> tuple[Any, Any]:
        losses: list[Any] = []
        args, kwargs, targets = parts
        return pipeline.step_microbatches(args, kwargs, targets=targets, losses=losses), losses

    results = run_locally(modules, schedule, main, loss_fn=model.loss_fn("mean"))
    (outputs,) = (outputs for outputs, _ in results if outputs is not None)
    expected = step_unsplit(modules, batch, model.loss_fn("mean"))
    assert_close("outputs", split(expected.outputs, NUM_MICROBATCHES), outputs)
    assert_same_grads("step", expected.grads, [grads_of(modules)])


@every_schedule
def test_lengths_may_change_with_microbatch_and_step_if_shapes_are_dynamic(
    schedule: Schedule,
) -> None:
    model, modules = MODELS["transformer"], transformer()
    loss_fn = model.loss_fn("sum")
    steps = [
        [(torch.randint(7, (2, length)), torch.randint(7, (2, length))) for length in lengths]
        for lengths in [(3, 5, 2, 4), (1, 6, 6, 2), (4, 4, 4, 4)]
    ]

    def main(pipeline: Pipeline) -> list[Any]:
        found = []
        for step in steps:
            args, targets = [(x,) for x, _ in step], [target for _, target in step]
            losses: list[Tensor] = []
            outputs = pipeline.step_microbatches(args, targets=targets, losses=losses)
            found.append((outputs, losses))
        return found

    options = {"loss_fn": loss_fn, "scale_grads": False}
    results = run_locally(
        modules, schedule, main, stage_options={"dynamic_shapes": True}, **options
    )
    (found,) = (steps for steps in results if steps[0][0] is not None)
    actual = grads_of(modules)
    zero_grad(modules)
    for step, (outputs, losses) in zip(steps, found, strict=True):
        for mb, (x, target) in enumerate(step):
            expected = run_unsplit(modules, (x,), {})
            loss = loss_fn(expected, target)
            loss.backward()
            assert_close(f"output of microbatch {mb}", expected.detach(), outputs[mb])
            assert_close(f"loss of microbatch {mb}", loss.detach(), losses[mb])
    assert_same_grads("three steps", grads_of(modules), [actual])


@every_schedule
def test_batch_size_may_change_with_the_step_if_shapes_are_dynamic(schedule: Schedule) -> None:
    modules = mlp()
    batches = [mlp_batch(size) for size in (8, 4, 13)]

    def main(pipeline: Pipeline) -> list[Any]:
        return [
            run(*batch.args, target=batch.target)
            for batch in batches
            for run in (pipeline.step, pipeline.eval)
        ]

    options = {"loss_fn": summed_square, "scale_grads": False}
    results = run_locally(
        modules, schedule, main, stage_options={"dynamic_shapes": True}, **options
    )
    (outputs,) = (outputs for outputs in results if outputs[0] is not None)
    actual = grads_of(modules)
    steps = [step_unsplit(modules, batch, summed_square) for batch in batches]
    assert_close("outputs", [step.outputs for step in steps for _ in range(2)], outputs)
    total = {n: sum(step.grads[n] for step in steps) for n in actual}  # type: ignore[misc]
    assert_same_grads("three steps", total, [actual])


@every_schedule
def test_one_stage_with_dynamic_shapes_makes_all_of_them_dynamic(schedule: Schedule) -> None:
    """Ranks agree on it, whichever of them was told."""
    modules, batches = mlp(), [mlp_batch(8), mlp_batch(4)]

    def main(group: LocalGroup) -> list[Any]:
        stages = [
            PipelineStage(
                modules[index], index, NUM_STAGES, CPU, group=group, dynamic_shapes=index == 1
            )
            for index in schedule.placement.stages_of(group.rank)
        ]
        pipeline = Pipeline(stages, schedule, loss_fn=mean_square)
        return [pipeline.eval(*batch.args, target=batch.target) for batch in batches]

    results = local_ranks(schedule.num_ranks, main)
    (outputs,) = (outputs for outputs in results if outputs[0] is not None)
    assert_close("outputs", [step_unsplit(modules, batch).outputs for batch in batches], outputs)


@every_schedule
def test_outputs_are_merged_as_the_spec_says(schedule: Schedule) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            return {"y": y, "t": y.float().t(), "first": y.mean()}

    modules = [*mlp(3), Last()]
    batch = mlp_batch()

    def loss_fn(outputs: Any, target: Tensor) -> Tensor:
        return mean_square(outputs["y"], target)

    spec = {"y": TensorChunkSpec(0), "t": TensorChunkSpec(1), "first": Replicate()}
    actual = step_locally(modules, schedule, batch, loss_fn=loss_fn, output_merge_spec=spec)
    expected = step_unsplit(modules, batch, loss_fn)
    assert_close("y", expected.outputs["y"], actual.outputs["y"])
    assert torch.float32 == actual.outputs["t"].dtype
    # Rounded to float32 after float64 sums that differ in their last bit: one float32 bit at most.
    torch.testing.assert_close(actual.outputs["t"], expected.outputs["t"], rtol=2e-7, atol=1e-9)
    first = expected.outputs["y"].tensor_split(NUM_MICROBATCHES)[0].mean()
    assert_close("first", first, actual.outputs["first"])
    assert_same_grads("step", expected.grads, [actual.grads])


@every_schedule
def test_arguments_are_cut_as_the_specs_say(schedule: Schedule) -> None:
    class Stage(nn.Module):
        def __init__(self, is_first: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).double()
            self.is_first = is_first

        def forward(self, x: Tensor, *, shift: Tensor, scale: Tensor) -> Tensor:
            y: Tensor = self.layer(x.t() if self.is_first else x)
            return torch.tanh(y * scale + shift.t())

    modules: list[nn.Module] = [Stage(index == 0) for index in range(NUM_STAGES)]
    kwargs = {"shift": randn(WIDTH, 8), "scale": randn(WIDTH)}
    batch = Batch((randn(WIDTH, 8),), kwargs, randn(8, WIDTH))
    actual = step_locally(
        modules,
        schedule,
        batch,
        args_chunk_spec=(TensorChunkSpec(1),),
        kwargs_chunk_spec={"shift": TensorChunkSpec(1), "scale": Replicate()},
    )
    assert_same(step_unsplit(modules, batch), actual)


@every_schedule
def test_without_a_loss_a_step_is_forward_only(schedule: Schedule) -> None:
    modules, batch = mlp(), mlp_batch()

    def main(pipeline: Pipeline) -> Any:
        return pipeline.step(*batch.args)

    results = run_locally(modules, schedule, main, loss_fn=None)
    (outputs,) = (outputs for outputs in results if outputs is not None)
    assert_close("outputs", step_unsplit(modules, batch).outputs, outputs)
    assert {None} == set(grads_of(modules).values())


@every_schedule
def test_ranks_that_do_not_need_the_batch_need_not_have_it(schedule: Schedule) -> None:
    modules, batch = mlp(), mlp_batch()

    def main(pipeline: Pipeline) -> Any:
        args = batch.args if 0 in pipeline.stages else ()
        target = batch.target if NUM_STAGES - 1 in pipeline.stages else None
        losses: list[Tensor] = []
        return pipeline.step(*args, target=target, losses=losses), losses

    results = run_locally(modules, schedule, main)
    (found,) = (result for result in results if result[1])
    assert_same(step_unsplit(modules, batch), StepRecord(*found, grads_of(modules)))


@every_schedule
def test_eval_leaves_gradients_alone_and_modules_in_their_mode(schedule: Schedule) -> None:
    modules, batch = mlp(), mlp_batch()
    for module in modules:
        module.eval()

    def main(pipeline: Pipeline) -> Any:
        before = grads_of(modules)
        outputs = pipeline.eval(*batch.args, target=batch.target)
        assert before == grads_of(modules)
        return outputs

    results = run_locally(modules, schedule, main)
    (outputs,) = (outputs for outputs in results if outputs is not None)
    assert not outputs.requires_grad
    assert not any(module.training for module in modules)


def test_eval_without_losses_needs_no_target() -> None:
    def main(group: LocalGroup) -> Tensor | None:
        stage = PipelineStage(nn.Identity(), group.rank, 2, "cpu", group=group)
        pipeline = Pipeline(stage, "1F1B", num_microbatches=2, loss_fn=nn.functional.mse_loss)
        return pipeline.eval(torch.ones(4, 3))

    assert torch.equal(torch.ones(4, 3), local_ranks(2, main)[1])


def test_loss_that_fails_without_a_target_says_that_there_was_none() -> None:
    def main(group: LocalGroup) -> None:
        stage = PipelineStage(nn.Linear(3, 3), group.rank, 2, "cpu", group=group)
        pipeline = Pipeline(stage, "1F1B", num_microbatches=2, loss_fn=nn.functional.mse_loss)
        pipeline.step(torch.ones(4, 3))

    with pytest.raises(AttributeError) as caught:
        local_ranks(2, main)
    assert "no target was given on this rank, which holds the last stage" in caught.value.__notes__

"""What a step refuses, and what custom functions may not do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from failing_steps import (
    Boom,
    Layer,
    alone,
    assert_rejected,
    errors_of,
    mse_loss,
    pipeline_of,
    raise_at,
    train,
)
from torch import Tensor

from penstock import LocalGroup, Pipeline, Schedule, local_ranks
from penstock.errors import CommError, MicrobatchError, StageError
from penstock.ir import Backward, Forward, Overlap, Send

NO_GRAD = (
    "step() was called where gradients are disabled, so there would be no backward. "
    "Call it outside of torch.no_grad(), or call eval()."
)


def _under_no_grad(step: Callable[[Pipeline], Any], **kwargs: Any) -> Callable[[LocalGroup], None]:
    def main(group: LocalGroup) -> None:
        pipeline = pipeline_of(group, Layer(), **kwargs)
        with torch.no_grad():
            step(pipeline)

    return main


def test_a_step_without_gradients_is_rejected() -> None:
    assert_rejected(StageError, NO_GRAD, _under_no_grad(train))


def test_a_step_of_microbatches_without_gradients_is_rejected() -> None:
    microbatches = [(torch.ones(2, 4),)] * 2
    targets = [torch.ones(2, 4)] * 2
    with pytest.raises(StageError, match="gradients are disabled"):
        local_ranks(1, _under_no_grad(lambda p: p.step_microbatches(microbatches, targets=targets)))


def test_an_evaluation_and_a_step_without_a_loss_run_without_gradients() -> None:
    local_ranks(1, _under_no_grad(lambda pipeline: pipeline.eval(torch.ones(4, 4)), loss_fn=None))
    local_ranks(1, _under_no_grad(train, loss_fn=None))


def test_a_schedule_without_backwards_runs_without_gradients() -> None:
    local_ranks(1, _under_no_grad(train, schedule="ForwardOnly"))


def test_a_schedule_without_backwards_takes_any_loss() -> None:
    def main(group: LocalGroup) -> list[tuple[int, ...]]:
        losses: list[Tensor] = []
        train(
            pipeline_of(group, Layer(), schedule="ForwardOnly", loss_fn=lambda y, t: y - t),
            losses=losses,
        )
        return [tuple(loss.shape) for loss in losses]

    assert [[(2, 4), (2, 4)]] == local_ranks(1, main)


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda y, t: y - t, "of shape (2, 4) and torch.float32"),
        (lambda y, t: y.sum((0, 1))[None].repeat(2), "of shape (2,) and torch.float32"),
        (lambda y, t: y[:0], "of shape (0, 4) and torch.float32"),
        (lambda y, t: y.sum() * 1j, "of shape () and torch.complex64"),
        (lambda y, t: 3.5, "3.5"),
        (lambda y, t: None, "None"),
    ],
    ids=["like the output", "vector", "empty", "complex", "float", "nothing"],
)
def test_a_loss_that_is_not_one_value_is_rejected(loss_fn: Any, got: str) -> None:
    message = (
        f"loss_fn returned a loss {got} for microbatch 0. Expected a tensor with one real value: "
        "let it return the mean, or the sum with scale_grads=False."
    )
    assert_rejected(
        StageError, message, lambda group: train(pipeline_of(group, Layer(), loss_fn=loss_fn))
    )  # fmt: skip


def test_an_evaluation_takes_any_loss() -> None:
    def main(group: LocalGroup) -> list[Any]:
        losses: list[Any] = []
        pipeline = pipeline_of(group, Layer(), loss_fn=lambda y, t: "fine")
        pipeline.eval(torch.ones(4, 4), losses=losses)
        return losses

    assert [["fine", "fine"]] == local_ranks(1, main)


def test_a_loss_that_is_cut_off_from_the_model_is_rejected() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output.detach(), target)

    message = (
        "loss_fn returned a loss that does not need a gradient for microbatch 0, although the "
        "outputs do, so nothing would be trained. Compute it from the outputs, without detach() or "
        "item()."
    )
    assert_rejected(
        StageError, message, lambda group: train(pipeline_of(group, Layer(), loss_fn=loss_fn))
    )


@pytest.mark.parametrize("name", ["args", "kwargs", "targets"])
@pytest.mark.parametrize(
    ("values", "got"), [([1], "1 values"), ((1, 2), "tuple"), ([1, 2, 3], "3 values")]
)
def test_a_batch_cut_into_another_number_of_microbatches_is_rejected(
    name: str, values: Any, got: str
) -> None:
    message = (
        f"{name} is {got}. Expected a list with one value for each of the 2 microbatches of the "
        "schedule."
    )
    assert_rejected(
        StageError,
        message,
        lambda group: pipeline_of(group, Layer()).step_microbatches(**{name: values}),
    )


@pytest.mark.parametrize(("name", "kind"), [("args", "tuple"), ("kwargs", "dict")])
def test_a_microbatch_that_is_no_tuple_or_dict_is_rejected(name: str, kind: str) -> None:
    """A tensor was spread over the stage's arguments, row by row."""
    message = (
        f"{name}[0] is a Tensor. Expected a {kind} for each microbatch: the arguments of the stage."
    )
    values = {name: [torch.ones(1, 4)] * 2}
    assert_rejected(
        StageError, message, lambda group: pipeline_of(group, Layer()).step_microbatches(**values)
    )


def test_a_closed_pipeline_is_not_used_again() -> None:
    def main(group: LocalGroup) -> None:
        pipeline = pipeline_of(group, Layer())
        train(pipeline)
        pipeline.close()
        train(pipeline)

    message = "rank 0: this pipeline has ended (it was closed). Make a new pipeline on all ranks."
    assert_rejected(CommError, message, main)


def test_a_batch_that_is_too_small_fails_on_all_ranks() -> None:
    def main(group: LocalGroup) -> None:
        pipeline = pipeline_of(group, Layer(), Layer(), m=3)
        train(pipeline, rows=3)
        pipeline.step(torch.ones(2, 4), target=torch.ones(3, 4))

    first, second = errors_of(2, main)
    assert isinstance(first, MicrobatchError)
    assert str(first).startswith("args[0] has size 2 along dim 0 (shape (2, 4)), too small for 3")
    assert isinstance(second, CommError)
    assert "rank 0 failed: MicrobatchError: args[0] has size 2" in str(second)


def test_a_pipeline_that_failed_is_not_used_again() -> None:
    told: dict[int, list[str]] = {}

    def main(group: LocalGroup) -> None:
        pipeline = pipeline_of(group, Layer(), Layer(raise_at(1)))
        with pytest.raises((Boom, CommError)):
            train(pipeline)
        for use in (train, lambda p: p.eval(torch.ones(4, 4)), lambda p: p.step_microbatches()):
            with pytest.raises(CommError) as caught:
                use(pipeline)
            told.setdefault(group.rank, []).append(str(caught.value))

    local_ranks(2, main)
    note = "in 1F0 (forward of microbatch 0 on stage 1), on rank 1"
    expected = (
        f"rank 1: this pipeline has ended (Boom: call 1, {note}). Make a new pipeline on all ranks."
    )
    assert [expected] * 3 == told[1]
    assert all(f"because rank 1 failed: Boom: call 1, {note}, in 0B0" in text for text in told[0])


def test_two_pipelines_of_the_same_ranks_take_turns() -> None:
    def main(group: LocalGroup) -> None:
        pipelines = [pipeline_of(group, Layer(), Layer()) for _ in range(2)]
        for _ in range(2):
            for pipeline in pipelines:
                train(pipeline)
                pipeline.eval(torch.ones(2, 4), target=torch.ones(2, 4))

    local_ranks(2, main)


def test_two_pipelines_of_the_same_ranks_may_differ() -> None:
    def main(group: LocalGroup) -> None:
        for m in (2, 4):
            train(pipeline_of(group, Layer(), Layer(), m=m))

    local_ranks(2, main)


def test_a_new_pipeline_works_after_one_failed() -> None:
    def main(group: LocalGroup) -> None:
        with pytest.raises((Boom, CommError)):
            train(pipeline_of(group, Layer(), Layer(raise_at(1))))
        train(pipeline_of(group, Layer(), Layer()))

    local_ranks(2, main)


@pytest.mark.parametrize("kind", [Send, int, None, "Forward", Forward(0, 0)])
def test_a_custom_function_for_what_is_no_compute_action_is_rejected(kind: Any) -> None:
    message = (
        f"kind is {kind!r}. Expected one of penstock.ir's Forward, Backward, BackwardInput, "
        "BackwardWeight, Recompute, Overlap."
    )
    assert_rejected(
        StageError,
        message,
        lambda group: pipeline_of(group, Layer()).register_custom_function(kind, print),
    )


def test_a_custom_function_may_run_only_its_own_action() -> None:
    def main(group: LocalGroup) -> None:
        pipeline = pipeline_of(group, Layer())
        pipeline.register_custom_function(
            Forward, lambda action, context: context.run(Forward(0, 1))
        )
        train(pipeline)

    message = (
        "a custom function was called for 0F0 and tried to run 0F1. "
        "It may run the action it was called for once, or each half of an overlap once."
    )
    assert_rejected(StageError, message, main)


def test_a_custom_function_may_run_the_halves_of_its_overlap() -> None:
    seen: list[str] = []

    def function(action: Overlap, context: Any) -> None:
        seen.append(str(action))
        context.run(action.backward)
        context.run(action.forward)

    def main(group: LocalGroup) -> None:
        schedule = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
        pipeline = Pipeline(alone()(group), schedule, loss_fn=mse_loss)
        pipeline.register_custom_function(Overlap, function)
        train(pipeline)

    local_ranks(1, main)
    assert ["(0F1;0B0)OVERLAP_F_B"] == seen


def test_a_custom_function_that_runs_nothing_is_told_so() -> None:
    def main(group: LocalGroup) -> None:
        pipeline = pipeline_of(group, Layer())
        pipeline.register_custom_function(Forward, lambda action, context: None)
        train(pipeline)

    message = (
        "a custom function was called for 0F0 and returned without running 0F0, which other "
        "actions wait for. Call context.run(action) in it."
    )
    assert_rejected(StageError, message, main)


@pytest.mark.parametrize("kind", [Forward, Backward])
def test_a_custom_function_that_runs_its_action_twice_is_told_so(kind: type) -> None:
    def twice(action: Any, context: Any) -> None:
        context.run(action)
        context.run(action)

    def main(group: LocalGroup) -> None:
        pipeline = pipeline_of(group, Layer(), Layer())
        pipeline.register_custom_function(kind, twice)
        train(pipeline)

    with pytest.raises(StageError):
        local_ranks(2, main)

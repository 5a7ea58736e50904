"""One rank fails, or is not given the same: all of them say where it began."""

import re
from typing import Any

import pytest
import torch
from failing_steps import (
    Boom,
    Layer,
    errors_of,
    mse_loss,
    pipeline_of,
    train,
)
from split_model import make_schedule, make_stages
from torch import Tensor

from penstock import LocalGroup, Pipeline, PipelineStage
from penstock.errors import AgreementError, CommError, MicrobatchError
from penstock.ir import Backward


def _disagreement(
    name: str, by_rank: list[dict[str, Any]], num_stages: list[int] | None = None
) -> list[str]:
    counts = num_stages or [len(by_rank)] * len(by_rank)

    def main(group: LocalGroup) -> None:
        kwargs = dict(by_rank[group.rank])
        schedule = make_schedule(kwargs.pop("schedule"), counts[group.rank], kwargs.pop("m"))
        modules = [Layer() for _ in range(schedule.num_stages)]
        train(Pipeline(make_stages(group, schedule, modules), schedule, **kwargs))

    errors = errors_of(len(by_rank), main)
    assert all(isinstance(error, AgreementError) for error in errors)
    assert all(str(error).startswith(f"the ranks disagree on {name} (") for error in errors)
    end = "Expected one value on all ranks: make the pipeline in the same way everywhere."
    assert all(str(error).endswith(end) for error in errors)
    return [str(error) for error in errors]


def test_ranks_that_disagree_on_the_number_of_microbatches_all_say_so() -> None:
    given = [
        {"schedule": "1F1B", "m": 2},
        {"schedule": "1F1B", "m": 3},
        {"schedule": "1F1B", "m": 2},
    ]
    for told in _disagreement("num_microbatches", given):
        assert "(rank 0: 2; rank 1: 3; rank 2: 2)" in told


def test_ranks_that_disagree_on_the_schedule_all_say_so() -> None:
    """Of one size, even: their orders differ."""
    given = [{"schedule": "1F1B", "m": 4}, {"schedule": "GPipe", "m": 4}]
    for told in _disagreement("schedule", given):
        digests = re.findall(
            r"rank \d: Schedule\(2 ranks, 2 stages, 4 microbatches, 16 actions\) "
            r"with orders ([0-9a-f]{8})",
            told,
        )
        assert 2 == len(set(digests))


def test_ranks_that_disagree_on_the_number_of_stages_all_say_so() -> None:
    given = [{"schedule": "GPipe", "m": 4}, {"schedule": "ZB-V", "m": 4}]
    for told in _disagreement("num_stages", given, num_stages=[2, 4]):
        assert "(rank 0: 2; rank 1: 4)" in told


def test_ranks_that_disagree_on_whether_there_is_a_loss_all_say_so() -> None:
    given = [{"schedule": "1F1B", "m": 2, "loss_fn": mse_loss}, {"schedule": "1F1B", "m": 2}]
    for told in _disagreement("loss_fn", given):
        assert "(rank 0: given; rank 1: none)" in told


class _BadBackward(torch.autograd.Function):
    """Raises in its second backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[int]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(1)
        if len(ctx.seen) == 2:
            raise Boom("in backward")
        return grad, None


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZB-H1", "Interleaved1F1B"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_exception_in_a_forward_keeps_its_identity_and_reaches_all(
    schedule: str, culprit: int
) -> None:
    raised: list[Boom] = []

    def explode(y: Tensor, call: int) -> Tensor:
        if call == 4:
            raised.append(Boom("in forward"))
            raise raised[0]
        return y

    def main(group: LocalGroup) -> None:
        modules = [Layer(explode if index == culprit else None) for index in range(3)]
        pipeline = pipeline_of(group, *modules, schedule=schedule, m=3)
        train(pipeline, rows=3)
        train(pipeline, rows=3)

    errors = errors_of(3, main)
    place = f"in {culprit}F0 (forward of microbatch 0 on stage {culprit}), on rank {culprit}"
    for rank, error in enumerate(errors):
        if rank == culprit:
            assert raised[0] is error
            assert Boom is type(error)
            assert [place] == error.__notes__
        else:
            assert isinstance(error, CommError)
            assert f"rank {culprit} failed: Boom: in forward, {place}" in str(error)
            assert str(error).startswith(f"rank {rank} stopped waiting for the ")
            (note,) = error.__notes__
            assert note.endswith(f"on rank {rank}")


@pytest.mark.parametrize(
    ("schedule", "place"),
    [
        ("1F1B", "1B1 (backward of microbatch 1 on stage 1), on rank 1"),
        ("ZB-H1", "1I1 (input backward of microbatch 1 on stage 1), on rank 1"),
    ],
)
def test_an_exception_in_a_backward_keeps_its_identity_and_says_where(
    schedule: str, place: str
) -> None:
    seen: list[int] = []

    def main(group: LocalGroup) -> None:
        modules = [Layer(), Layer(lambda y, _: _BadBackward.apply(y, seen)), Layer()]
        pipeline = pipeline_of(group, *modules, schedule=schedule)
        train(pipeline)
        train(pipeline)  # The last rank had done its part of the first.

    first, second, third = errors_of(3, main)
    assert Boom is type(second)
    assert [f"in {place}"] == second.__notes__
    assert f"because rank 1 failed: Boom: in backward, in {place}" in str(first)
    assert isinstance(third, CommError)


def test_an_exception_in_loss_fn_says_of_which_microbatch() -> None:
    calls: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise Boom("in loss")
        return mse_loss(output, target)

    errors = errors_of(
        2, lambda group: train(pipeline_of(group, Layer(), Layer(), loss_fn=loss_fn))
    )
    place = "in 1F1 (forward of microbatch 1 on stage 1), on rank 1"
    assert Boom is type(errors[1])
    assert [place] == errors[1].__notes__
    assert f"rank 1 failed: Boom: in loss, {place}" in str(errors[0])


@pytest.mark.parametrize("kind", [StopIteration, GeneratorExit, KeyboardInterrupt, SystemExit])
def test_exceptions_that_python_treats_in_a_way_of_their_own_get_through(
    kind: type[BaseException],
) -> None:
    def explode(y: Tensor, call: int) -> Tensor:
        raise kind("mine")

    errors = errors_of(2, lambda group: train(pipeline_of(group, Layer(), Layer(explode))))
    assert kind is type(errors[1])
    assert f"rank 1 failed: {kind.__name__}: mine" in str(errors[0])


def test_an_exception_in_a_callback_says_where() -> None:
    def main(group: LocalGroup) -> None:
        def ready(stage: PipelineStage) -> None:
            if stage.stage_index == 1:
                raise Boom("in callback")

        train(pipeline_of(group, Layer(), Layer(), on_grads_ready=ready))

    first, second = errors_of(2, main)
    place = "in 1B1 (backward of microbatch 1 on stage 1), on rank 1"
    assert [place] == second.__notes__
    assert f"Boom: in callback, {place}" in str(first)


def test_an_exception_in_a_custom_function_says_where() -> None:
    def explode(action: Any, context: Any) -> None:
        if context.stages.keys() == {0}:
            raise Boom("custom")
        context.run(action)

    def main(group: LocalGroup) -> None:
        pipeline = pipeline_of(group, Layer(), Layer())
        pipeline.register_custom_function(Backward, explode)
        train(pipeline)
        train(pipeline)  # The last rank had done its part of the first.

    first, second = errors_of(2, main)
    place = "in 0B0 (backward of microbatch 0 on stage 0), on rank 0"
    assert Boom is type(first)
    assert [place] == first.__notes__
    assert f"rank 0 failed: Boom: custom, {place}" in str(second)


def test_outputs_that_cannot_be_merged_are_told_on_the_last_rank() -> None:
    def main(group: LocalGroup) -> None:
        module = Layer(lambda y, call: y[:, :call])
        pipeline = pipeline_of(group, Layer(), module, loss_fn=lambda y, t: y.sum())
        train(pipeline)
        train(pipeline)

    errors = errors_of(2, main)
    assert isinstance(errors[1], MicrobatchError)
    assert "rank 1 failed: MicrobatchError: microbatch 1 cannot be joined" in str(errors[0])

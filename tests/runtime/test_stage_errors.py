"""What a stage refuses: places, groups, examples, and what is not like them."""

import re
from typing import Any

import pytest
import torch
from failing_steps import (
    LIKE_EXAMPLES,
    Layer,
    alone,
    assert_rejected,
    errors_of,
    mse_loss,
    train,
)
from split_model import CPU, make_schedule
from torch import Tensor, nn

import penstock
from penstock import LocalGroup, Pipeline, PipelineStage, local_ranks
from penstock.errors import (
    CommError,
    PipelineError,
    PipeliningMetadataError,
    PipeliningShapeError,
    StageError,
)


def test_a_stage_without_a_group_is_rejected_where_torch_distributed_is_not_initialised() -> None:
    message = (
        "The stage has no group, and torch.distributed is not initialised. Call "
        "torch.distributed.init_process_group() first, or run the ranks in this process with "
        "penstock.local_ranks() and give the stage its group."
    )
    with pytest.raises(StageError, match=f"^{re.escape(message)}$"):
        PipelineStage(nn.Linear(4, 4), 0, 1, CPU)


@pytest.mark.parametrize(
    ("stage_index", "num_stages", "message"),
    [
        ("0", 2, "stage_index is '0'. Expected a whole number."),
        (0, 2.0, "num_stages is 2.0. Expected a whole number."),
        (None, 2, "stage_index is None. Expected a whole number."),
        *(
            (
                index,
                count,
                f"stage_index is {index}, but num_stages is {count}. "
                "Stages are numbered from 0 to num_stages - 1.",
            )
            for index, count in ((2, 2), (-1, 2), (0, 0), (5, 1))
        ),
    ],
)
def test_a_stage_out_of_place_is_rejected(stage_index: Any, num_stages: Any, message: str) -> None:
    assert_rejected(
        StageError,
        message,
        lambda group: PipelineStage(nn.Linear(4, 4), stage_index, num_stages, CPU, group=group),
    )


@pytest.mark.parametrize("name", ["input_args", "output_args"])
def test_an_example_that_is_no_tensor_is_rejected(name: str) -> None:
    message = (
        f"{name} holds a int. Expected tensors like those of one microbatch; "
        "they may be on the meta device."
    )
    assert_rejected(StageError, message, alone(**{name: (torch.ones(2), 3)}))


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize(
    ("grad", "described"),
    [
        (torch.ones(3, 2), "of shape (3, 2) and torch.float32"),
        (torch.ones(2, 3).double(), "of shape (2, 3) and torch.float64"),
    ],
    ids=["shape", "dtype"],
)
def test_an_example_of_a_gradient_must_be_like_its_tensor(
    kind: str, grad: Tensor, described: str
) -> None:
    message = (
        f"{kind}_args[1] is of shape (2, 3) and torch.float32, but its gradient is {described}. "
        "A gradient has the shape and dtype of its tensor."
    )
    examples = {f"{kind}_args": (torch.ones(1), torch.ones(2, 3)), f"{kind}_grads": (None, grad)}
    assert_rejected(StageError, message, alone(**examples))


def test_examples_on_the_meta_device_and_gradients_that_fit_are_accepted() -> None:
    example = torch.empty(2, 4, device="meta")
    kwargs = {"input_args": example, "output_args": [example], "output_grads": example}
    stage_of = alone(**kwargs)
    local_ranks(1, lambda group: train(Pipeline(stage_of(group), "1F1B", num_microbatches=2)))


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (
            {"input_args": torch.ones(3, 4)},
            f"stage 1, microbatch 0: input 0: shape mismatch: expected (3, 4), got (2, 4). "
            f"{LIKE_EXAMPLES}",
        ),
        (
            {"output_args": (torch.ones(2, 5),)},
            f"stage 1, microbatch 0: output 0: shape mismatch: expected (2, 5), got (2, 4). "
            f"{LIKE_EXAMPLES}",
        ),
        (
            {"input_args": torch.ones(2, 4).double()},
            "stage 1, microbatch 0: input 0: dtype mismatch: expected torch.float64, "
            f"got torch.float32. {LIKE_EXAMPLES}",
        ),
        (
            {"output_args": torch.ones(2, 4).bfloat16()},
            "stage 1, microbatch 0: output 0: dtype mismatch: expected torch.bfloat16, "
            f"got torch.float32. {LIKE_EXAMPLES}",
        ),
        (
            {"input_args": (torch.ones(2, 4), torch.ones(2, 4))},
            "stage 1, microbatch 0: input: number mismatch: expected 2 tensors, got 1. "
            "Give the stage examples of all its tensors, or none.",
        ),
        (
            {"output_args": ()},
            "stage 1, microbatch 0: output: number mismatch: expected 0 tensors, got 1. "
            "Give the stage examples of all its tensors, or none.",
        ),
    ],
    ids=["input shape", "output shape", "input dtype", "output dtype", "inputs", "outputs"],
)
def test_a_microbatch_unlike_the_examples_is_rejected_before_anything_is_sent(
    examples: dict[str, Any], message: str
) -> None:
    calls: list[int] = []

    def main(group: LocalGroup) -> None:
        schedule = make_schedule("1F1B", 3, 2)
        module = Layer(lambda y, call: (calls.append(group.rank), y)[1])
        extra = examples if group.rank == 1 else {}
        stage = PipelineStage(module, group.rank, 3, CPU, group=group, **extra)
        train(Pipeline(stage, schedule, loss_fn=mse_loss))

    first, second, third = errors_of(3, main)
    assert isinstance(second, PipeliningShapeError)
    assert message == str(second)
    assert ["in 1F0 (forward of microbatch 0 on stage 1), on rank 1"] == second.__notes__
    for error in (first, third):
        assert isinstance(error, CommError)
        assert "because rank 1 failed: PipeliningShapeError: stage 1, microbatch 0" in str(error)
    assert 2 not in calls


def test_an_evaluation_is_checked_against_the_examples_too() -> None:
    message = (
        "stage 0, microbatch 0: input 0: shape mismatch: expected (9, 4), got (2, 4). "
        f"{LIKE_EXAMPLES}"
    )
    stage_of = alone(input_args=torch.ones(9, 4))

    def main(group: LocalGroup) -> None:
        Pipeline(stage_of(group), "1F1B", num_microbatches=2).eval(torch.ones(4, 4))

    assert_rejected(PipeliningShapeError, message, main)


def test_both_names_are_one_error_which_is_a_runtime_error() -> None:
    assert PipeliningMetadataError is PipeliningShapeError
    assert issubclass(PipeliningShapeError, PipelineError)
    assert issubclass(PipeliningShapeError, RuntimeError)


def test_a_base_of_schedules_is_not_made_itself() -> None:
    message = (
        "PipelineScheduleSingle is a base class, not a schedule. Use a class such as "
        "Schedule1F1B, or penstock.Pipeline."
    )
    kind = penstock.PipelineScheduleSingle
    assert_rejected(StageError, message, lambda group: kind(alone()(group), 2))

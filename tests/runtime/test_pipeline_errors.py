"""What a pipeline and torch's schedule classes refuse to be made of."""

import re
from typing import Any

import pytest
from failing_steps import (
    alone,
    assert_rejected,
    errors_of,
)
from split_model import CPU, make_schedule
from torch import nn
from torch.distributed import pipelining as torch_pipelining

import penstock
from penstock import LocalGroup, Pipeline, PipelineStage, Placement, Schedule, local_ranks
from penstock.errors import ScheduleError, StageError
from penstock.ir import Backward, Forward


@pytest.mark.parametrize("timeout", [0, -1, -0.5, float("nan"), "600", None])
def test_a_timeout_that_is_not_positive_is_rejected(timeout: Any) -> None:
    assert_rejected(
        StageError,
        f"timeout is {timeout!r}. Expected seconds, more than 0 and at most a year.",
        lambda group: Pipeline(alone()(group), "1F1B", num_microbatches=2, timeout=timeout),
    )


def test_an_unknown_schedule_is_rejected_with_a_hint() -> None:
    with pytest.raises(ScheduleError, match=r"^There is no schedule named '1F1C'\. Did you mean"):
        local_ranks(1, lambda group: Pipeline(alone()(group), "1F1C", num_microbatches=2))


def test_the_name_of_a_schedule_needs_the_number_of_microbatches() -> None:
    message = (
        "schedule is the name '1F1B', which does not say how many microbatches there are. "
        "Give num_microbatches too, or a Schedule."
    )
    assert_rejected(StageError, message, lambda group: Pipeline(alone()(group), "1F1B"))


@pytest.mark.parametrize("schedule", [None, 3, torch_pipelining.Schedule1F1B])
def test_what_is_no_schedule_is_rejected(schedule: Any) -> None:
    message = (
        f"schedule is {schedule!r}. Expected a penstock.Schedule, or the name of one with "
        "num_microbatches."
    )
    assert_rejected(StageError, message, lambda group: Pipeline(alone()(group), schedule))


def test_a_schedule_for_another_number_of_microbatches_is_rejected() -> None:
    message = (
        "num_microbatches is 3, but the schedule has 2. "
        "Leave it out, or make the schedule for that number."
    )
    schedule = make_schedule("1F1B", 1, 2)
    assert_rejected(
        StageError, message, lambda group: Pipeline(alone()(group), schedule, num_microbatches=3)
    )


def test_a_schedule_that_cannot_be_run_is_rejected() -> None:
    schedule = Schedule([[Backward(0, 0), Forward(0, 0)]], Placement([0]), 1)
    with pytest.raises(ScheduleError, match="0B0 runs before"):
        local_ranks(1, lambda group: Pipeline(alone()(group), schedule))


def test_too_few_microbatches_for_a_schedule_are_rejected() -> None:
    message = (
        "num_microbatches is 0. 1F1B needs at least 1 where num_ranks is 1. "
        "Cut the batch into more microbatches, or use fewer ranks."
    )
    assert_rejected(
        ScheduleError,
        message,
        lambda group: Pipeline(alone()(group), "1F1B", num_microbatches=0),
    )


def test_stages_of_torch_are_rejected() -> None:
    stage = object.__new__(torch_pipelining.PipelineStage)
    message = (
        "stages holds a PipelineStage. Expected penstock.PipelineStage: import the stage from "
        "penstock too."
    )
    assert_rejected(
        StageError, message, lambda group: Pipeline([stage], "1F1B", num_microbatches=2)
    )


@pytest.mark.parametrize("kind", [torch_pipelining.PipelineStage, nn.Linear])
def test_a_single_stage_that_is_not_ours_is_rejected(kind: type) -> None:
    with pytest.raises(StageError, match=r"Expected penstock\.PipelineStage"):
        local_ranks(1, lambda group: Pipeline(object.__new__(kind), "1F1B", num_microbatches=2))


def test_no_stages_are_rejected() -> None:
    message = "stages is empty. Give the stages that this rank holds."
    assert_rejected(StageError, message, lambda group: Pipeline([], "1F1B", num_microbatches=2))


def test_stages_that_differ_in_what_they_must_share_are_rejected() -> None:
    def stages(group: LocalGroup, **changed: Any) -> list[PipelineStage]:
        kwargs = [{"num_stages": 2, "device": "cpu"}, {"num_stages": 2, "device": "cpu"} | changed]
        return [
            PipelineStage(nn.Linear(4, 4), index, group=group, **kwargs[index]) for index in (0, 1)
        ]

    def main(group: LocalGroup, changed: dict[str, Any]) -> None:
        Pipeline(stages(group, **changed), "Interleaved1F1B", num_microbatches=2)

    end = "Give all of them the same."
    with pytest.raises(StageError, match=f"differ in num_stages: 2, 3. {end}"):
        local_ranks(1, main, {"num_stages": 3})
    with pytest.raises(StageError, match=f"differ in device: cpu, meta. {end}"):
        local_ranks(1, main, {"device": "meta"})


def test_stages_of_different_groups_are_rejected() -> None:
    groups: list[LocalGroup] = []
    local_ranks(2, groups.append)
    stages = [PipelineStage(nn.Linear(4, 4), i, 2, CPU, group=groups[i]) for i in (0, 1)]
    message = (
        "the stages of one rank differ in group: LocalGroup(rank 0 of 2), LocalGroup(rank 1 of 2). "
        "Give all of them the same."
    )
    with pytest.raises(StageError, match=f"^{re.escape(message)}$"):
        Pipeline(stages, "Interleaved1F1B", num_microbatches=2)


def test_a_schedule_for_another_number_of_ranks_is_rejected() -> None:
    schedule = make_schedule("1F1B", 2, 2)
    message = (
        "the schedule is for 2 ranks, but the group has 1. "
        "Make the schedule for that number, or give the stages another group."
    )
    assert_rejected(StageError, message, lambda group: Pipeline(alone()(group), schedule))


def test_a_schedule_for_another_number_of_stages_is_rejected() -> None:
    message = (
        "the schedule has 1 stages, but the stages say that num_stages is 3. Cut the model into 1 "
        "stages."
    )
    assert_rejected(
        StageError,
        message,
        lambda group: Pipeline(
            PipelineStage(nn.Linear(4, 4), 0, 3, CPU, group=group), "1F1B", num_microbatches=2
        ),
    )


def test_a_stage_on_the_wrong_rank_is_rejected() -> None:
    errors = errors_of(
        2,
        lambda group: Pipeline(
            PipelineStage(nn.Linear(4, 4), 1 - group.rank, 2, CPU, group=group),
            "1F1B",
            num_microbatches=2,
        ),
    )
    for rank, error in enumerate(errors):
        assert isinstance(error, StageError)
        assert str(error) == (
            f"rank {rank} was given stages [{1 - rank}], but the schedule places [{rank}] there. "
            f"Give it those: schedule.placement.stages_of({rank})."
        )


def test_the_same_stage_twice_is_rejected() -> None:
    with pytest.raises(StageError, match=r"^rank 0 was given stages \[0, 0\], but the schedule"):
        local_ranks(
            1,
            lambda group: Pipeline(
                [PipelineStage(nn.Linear(4, 4), 0, 2, CPU, group=group)] * 2,
                "Interleaved1F1B",
                num_microbatches=2,
            ),
        )


@pytest.mark.parametrize("stage", [[], None, "stage"])
def test_a_schedule_class_with_one_stage_per_rank_takes_a_stage(stage: Any) -> None:
    message = (
        f"stage is a {type(stage).__name__}. Schedule1F1B takes one penstock.PipelineStage; "
        "a schedule with several per rank takes a list."
    )
    with pytest.raises(StageError, match=f"^{re.escape(message)}$"):
        penstock.Schedule1F1B(stage, 2)


def test_a_backward_without_autograd_is_rejected() -> None:
    message = (
        "backward_requires_autograd is False, but every backward here needs autograd. "
        "Leave it out; register_custom_function() can replace any action."
    )
    for kind in (penstock.ScheduleInterleaved1F1B, penstock.ScheduleLoopedBFS):
        with pytest.raises(StageError, match=f"^{re.escape(message)}$"):
            kind([], 2, backward_requires_autograd=False)


def test_a_schedule_without_a_class_says_what_to_use() -> None:
    message = (
        "The schedule InterleavedAhead has no class of its own; the classes are for 1F1B, "
        "DualPipeV, GPipe, Interleaved1F1B, InterleavedZeroBubble, LoopedBFS, V-Half, V-Min, "
        "ZB-H1, ZB-H2, ZB-V. Use Pipeline(stages, 'InterleavedAhead', num_microbatches=...)."
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}$"):
        penstock.get_schedule_class("InterleavedAhead")


def test_a_schedule_class_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(ScheduleError, match=r"^There is no schedule named '1F1C'"):
        penstock.get_schedule_class("1F1C")

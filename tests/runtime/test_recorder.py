"""Recording the steps of a pipeline, on ranks of this process."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch

import penstock
from local_steps import FOUR_STAGES, mean_square, mlp, mlp_batch, run_locally
from penstock import LocalGroup, Pipeline, Recording, schedules
from penstock.errors import AgreementError, RecordError
from penstock.ir import Forward
from penstock.ir.action import compute_parts
from penstock.runtime.measuring.action_times import Meter
from penstock.runtime.recording.recorder import MOST_STEPS, _spells
from stage_training import make_stages

BATCH = mlp_batch()


def step(pipeline: Pipeline) -> None:
    pipeline.step(*BATCH.args, target=BATCH.target)


@pytest.mark.parametrize("name", FOUR_STAGES)
def test_recorded_steps_have_every_action_of_the_schedule_in_its_order(name: str) -> None:
    schedule = FOUR_STAGES[name]

    def main(pipeline: Pipeline) -> Recording:
        for _ in range(3):
            step(pipeline)
        return pipeline.recording()

    first, *others = run_locally(mlp(), schedule, main, loss_fn=mean_square, record=True)
    assert [first] * len(others) == others
    assert [0, 1, 2] == [recorded.number for recorded in first.steps]
    expected = tuple(
        tuple(part for action in order for part in compute_parts(action))
        for order in schedule.orders
    )
    for recorded in first.steps:
        assert expected == recorded.timeline.schedule.orders


@pytest.mark.parametrize("name", FOUR_STAGES)
def test_actions_of_a_rank_do_not_overlap(name: str) -> None:

    def main(pipeline: Pipeline) -> Recording:
        step(pipeline)
        step(pipeline)
        return pipeline.recording()

    recording = run_locally(mlp(), FOUR_STAGES[name], main, loss_fn=mean_square, record=True)[0]
    for recorded in recording.steps:
        timeline = recorded.timeline
        assert 0 == min(starts[0] for starts in timeline.starts)
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
            assert list(starts) == sorted(starts)
            assert all(start <= end for start, end in zip(starts, ends, strict=True))
            assert all(a <= b for a, b in zip(ends, starts[1:], strict=False))
    assert recording == Recording.from_json(recording.to_json())


def test_block_records_what_is_stepped_in_it_alone() -> None:
    def main(pipeline: Pipeline) -> Recording:
        step(pipeline)
        with penstock.record() as run:
            step(pipeline)
            pipeline.eval(*BATCH.args)
        step(pipeline)
        return run.recording

    recording = run_locally(mlp(), FOUR_STAGES["1F1B"], main, loss_fn=mean_square)[0]
    trained, evaluated = (recorded.timeline.schedule for recorded in recording.steps)
    assert FOUR_STAGES["1F1B"] == trained
    assert 4 * 4 == evaluated.num_actions


def test_broken_block_leaves_the_pipeline_as_it_was() -> None:
    def main(pipeline: Pipeline) -> int:
        step(pipeline)
        with contextlib.suppress(ZeroDivisionError), penstock.record():
            step(pipeline)
            raise ZeroDivisionError
        with pytest.raises(RecordError, match="this pipeline does not record its steps"):
            pipeline.recording()
        with penstock.record() as run:
            step(pipeline)
        return len(run.recording.steps)

    assert [1] * 2 == run_locally(mlp(), FOUR_STAGES["ZB-V"], main, loss_fn=mean_square)


def test_blocks_within_each_other_record_each_all_of_its_steps() -> None:
    def main(pipeline: Pipeline) -> tuple[int, int]:
        with penstock.record() as outer:
            step(pipeline)
            with penstock.record() as inner:
                step(pipeline)
            step(pipeline)
        return len(outer.recording.steps), len(inner.recording.steps)

    assert [(3, 1)] * 2 == run_locally(mlp(), FOUR_STAGES["ZB-V"], main, loss_fn=mean_square)


def test_ranks_that_recorded_different_steps_are_told_so() -> None:
    def main(pipeline: Pipeline) -> None:
        step(pipeline)
        is_first = 0 in pipeline.stages
        with penstock.record() if is_first else contextlib.nullcontext():
            step(pipeline)
            with contextlib.nullcontext() if is_first else penstock.record():
                step(pipeline)

    disagree = r"disagree on which steps were recorded \(rank 0: \[0, 1\]; rank 1: \[0\]\)"
    with pytest.raises(AgreementError, match=disagree):
        run_locally(mlp(), FOUR_STAGES["ZB-V"], main, loss_fn=mean_square)


def test_block_in_a_pipeline_that_records_is_part_of_its_own_recording() -> None:
    def main(pipeline: Pipeline) -> list[int]:
        step(pipeline)
        with penstock.record() as run:
            step(pipeline)
            step(pipeline)
        return [len(run.recording.steps), len(pipeline.recording().steps)]

    assert [[2, 3]] * 2 == run_locally(
        mlp(), FOUR_STAGES["ZB-V"], main, loss_fn=mean_square, record=True
    )


def test_only_the_last_steps_are_kept() -> None:
    def main(pipeline: Pipeline) -> list[int]:
        for _ in range(MOST_STEPS + 2):
            step(pipeline)
        return [recorded.number for recorded in pipeline.recording().steps]

    schedule = schedules.get("1F1B")(num_ranks=1, num_microbatches=1)
    [numbers] = run_locally(mlp(1), schedule, main, loss_fn=mean_square, record=True)
    assert list(range(2, MOST_STEPS + 2)) == numbers


def test_steps_that_auto_counts_memory_in_are_left_out() -> None:
    def on_rank(group: LocalGroup) -> list[int]:
        pipeline = Pipeline(
            make_stages(group, modules, [group.rank]),
            "auto",
            num_microbatches=4,
            loss_fn=mean_square,
            record=True,
        )
        for _ in range(4):
            step(pipeline)
        return [recorded.number for recorded in pipeline.recording().steps]

    modules = mlp(2)
    assert [[1, 2, 3]] * 2 == penstock.local_ranks(2, on_rank)


def test_results_are_those_of_a_pipeline_that_does_not_record() -> None:
    def outputs(pipeline: Pipeline) -> Any:
        return pipeline.step(*BATCH.args, target=BATCH.target)

    modules = mlp()
    plain = run_locally(modules, FOUR_STAGES["ZB-V"], outputs, loss_fn=mean_square)
    recorded = run_locally(modules, FOUR_STAGES["ZB-V"], outputs, loss_fn=mean_square, record=True)
    assert torch.equal(plain[0], recorded[0])


def test_pipeline_that_does_not_record_has_no_recording() -> None:
    with pytest.raises(RecordError, match=r"does not record its steps. Make it with record="):
        run_locally(mlp(), FOUR_STAGES["1F1B"], Pipeline.recording, loss_fn=mean_square)


def test_recording_before_the_first_step_is_refused_and_the_pipeline_runs_on() -> None:
    def main(pipeline: Pipeline) -> int:
        with pytest.raises(RecordError, match=r"no step has been recorded yet. Run one before"):
            pipeline.recording()
        step(pipeline)
        return len(pipeline.recording().steps)

    assert [1] * 4 == run_locally(
        mlp(), FOUR_STAGES["1F1B"], main, loss_fn=mean_square, record=True
    )


def test_block_without_a_step_is_refused() -> None:
    with (
        pytest.raises(RecordError, match="nothing was recorded: no pipeline ran a step in this"),
        penstock.record(),
    ):
        pass


def test_recording_within_its_block_is_refused() -> None:
    with pytest.raises(RecordError, match="not available yet"), penstock.record() as run:
        run.recording  # noqa: B018  # It is a property.


def test_block_with_two_pipelines_is_refused() -> None:
    def main(pipeline: Pipeline) -> None:
        other = Pipeline(list(pipeline.stages.values()), pipeline.schedule, loss_fn=mean_square)
        with penstock.record():
            step(pipeline)
            step(other)

    schedule = schedules.get("1F1B")(num_ranks=1, num_microbatches=1)
    with pytest.raises(RecordError, match="two pipelines ran steps in one `with"):
        run_locally(mlp(1), schedule, main, loss_fn=mean_square)


def test_error_in_a_block_is_not_hidden_by_the_recording() -> None:
    with pytest.raises(ZeroDivisionError), penstock.record():
        raise ZeroDivisionError


def test_ranks_that_do_not_all_record_are_told_so() -> None:
    def on_rank(group: LocalGroup) -> None:
        pipeline = Pipeline(
            make_stages(group, modules, [group.rank]),
            schedules.get("1F1B")(num_ranks=2, num_microbatches=4),
            loss_fn=mean_square,
            record=group.rank == 0,
        )
        step(pipeline)

    modules = mlp(2)
    with pytest.raises(AgreementError, match=r"disagree on record \(rank 0: True; rank 1: False"):
        penstock.local_ranks(2, on_rank)


def test_action_begins_when_its_messages_are_there_by_the_clock_of_rank_0() -> None:
    meter = Meter(torch.device("cpu"))
    meter.began_s, meter.ended_s = 10.0, 16.0
    meter._waits_s = [3.0]
    meter._ends = [(Forward(0, 0), 15.0, 1), (Forward(0, 1), 16.0, 1)]
    expected = ((Forward(0, 0), 11.0, 13.0), (Forward(0, 1), 13.0, 14.0))
    assert expected == _spells(meter, ahead_s=2.0)


def test_pipeline_lets_go_of_a_block_that_has_ended() -> None:
    def main(pipeline: Pipeline) -> bool:
        with penstock.record() as run:
            step(pipeline)
        recorder = weakref.ref(run._recorder)
        del run
        gc.collect()
        return recorder() is None

    assert all(run_locally(mlp(), FOUR_STAGES["1F1B"], main, loss_fn=mean_square))

"""Recordings with memory: what a rank held at each action, beside what its costs say."""

import pytest
import torch
from torch import Tensor, nn

import penstock
from local_steps import (
    FOUR_STAGES,
    assert_same,
    mean_square,
    mlp,
    mlp_batch,
    run_locally,
    step_locally,
    step_unsplit,
)
from penstock import LocalGroup, Pipeline, Recording, schedules
from penstock.errors import RecordError
from penstock.ir import Forward
from penstock.runtime.measuring.action_bytes import ActionBytes
from penstock.runtime.measuring.observer import Observer
from penstock.runtime.recording.recorder import Recorder
from stage_training import make_stages

ROWS, WIDTH = 8, 16
MICROBATCH = ROWS * WIDTH * 8  # Bytes of what a stage takes or makes, in 64 bits.
BATCH = mlp_batch()


def record_linear(
    name: str = "1F1B", *, num_steps: int = 3, return_outputs: bool = False
) -> Recording:
    """Record stages that are one linear layer each, which holds its input and its output."""
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    modules = [nn.Linear(WIDTH, WIDTH).double() for _ in range(schedule.num_stages)]
    x, target = torch.randn(2, 4 * ROWS, WIDTH, dtype=torch.float64)

    def main(pipeline: Pipeline) -> Recording:
        with penstock.record(memory=True) as run:
            for _ in range(num_steps):
                pipeline.step(x, target=target, return_outputs=return_outputs)
        return run.recording

    first, other = run_locally(modules, schedule, main)
    assert first == other
    return first


def test_first_step_counts_memory_and_the_others_are_timed() -> None:
    recording = record_linear()
    assert [1, 2] == [step.number for step in recording.steps]
    assert list(map(len, recording.schedule.orders)) == list(map(len, recording.memory))
    assert recording == Recording.from_json(recording.to_json())


def test_forwards_add_what_microbatches_hold_and_backwards_free_it() -> None:
    recording = record_linear()
    order, held = recording.schedule.orders[0], recording.memory[0]
    assert [Forward(0, 0), Forward(0, 1)] == list(order[:2])
    # The first stage holds its output; its input is the caller's.
    assert [MICROBATCH, 2 * MICROBATCH] == [level.after for level in held[:2]]
    assert 0 == held[-1].after  # Gradients of weights stay, and do not count.
    assert all(level.during >= level.after for row in recording.memory for level in row)


def test_outputs_that_are_kept_for_the_caller_count() -> None:
    without, kept = (record_linear(return_outputs=keeps) for keeps in (False, True))
    more = kept.memory[1][-1].after - without.memory[1][-1].after
    assert 4 * MICROBATCH == more


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-V"])
def test_simulated_peak_is_near_the_measured(name: str) -> None:
    recording = record_linear(name)
    simulated = recording.simulated()
    for rank, measured in enumerate(recording.typical().measured_peaks):
        assert simulated.ranks[rank].peak_memory == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("name", FOUR_STAGES)
def test_step_that_counts_memory_has_the_same_gradients(name: str) -> None:
    modules = mlp()
    expected = step_unsplit(modules, BATCH)
    assert_same(expected, step_locally(modules, FOUR_STAGES[name], BATCH, record_memory=True))


def test_pipeline_records_memory_of_its_own() -> None:
    def main(pipeline: Pipeline) -> Recording:
        pipeline.step(*BATCH.args, target=BATCH.target)
        pipeline.eval(*BATCH.args)
        pipeline.step(*BATCH.args, target=BATCH.target)
        pipeline.step(*BATCH.args, target=BATCH.target)
        return pipeline.recording()

    recording = run_locally(mlp(), FOUR_STAGES["ZB-V"], main, record_memory=True)[0]
    assert [1, 2, 3] == [step.number for step in recording.steps]
    assert FOUR_STAGES["ZB-V"] == recording.schedule
    assert min(recording.typical().measured_peaks) > 0


def test_only_step_that_counted_memory_is_not_enough() -> None:
    with pytest.raises(RecordError, match="or two if the first counts memory"):
        record_linear(num_steps=1)


def test_schedule_that_auto_chose_is_counted() -> None:
    def on_rank(group: LocalGroup) -> Recording:
        modules = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
        stages = make_stages(group, modules, [group.rank])
        pipeline = Pipeline(
            stages, "auto", num_microbatches=4, loss_fn=mean_square, record_memory=True
        )
        x: Tensor = torch.randn(4 * ROWS, WIDTH, dtype=torch.float64)
        for _ in range(40):
            pipeline.step(x, target=x, return_outputs=False)
        return pipeline.recording()

    recording, _ = penstock.local_ranks(2, on_rank)
    # Most of the steps ran what was chosen, which was counted after it had been chosen.
    assert recording.memory
    assert min(recording.typical().measured_peaks) > 0


def test_memory_is_counted_anew_when_the_schedule_changes() -> None:
    recorder = Recorder(counts_memory=True)
    first, second = FOUR_STAGES["1F1B"], FOUR_STAGES["ZB-H1"]
    counted = Observer(memory=ActionBytes(torch.device("cpu")))
    assert recorder.wants_memory(first)
    recorder.take(counted, first)
    assert not recorder.wants_memory(first)
    assert recorder.wants_memory(second)
    assert not Recorder().wants_memory(first)

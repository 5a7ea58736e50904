"""torch.profiler shows the actions of a step as named ranges, and costs nothing when it is off."""

import contextlib
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

import penstock
from local_steps import (
    FOUR_STAGES,
    NUM_MICROBATCHES,
    assert_same,
    mean_square,
    mlp,
    mlp_batch,
    run_locally,
    step_locally,
    step_unsplit,
)
from penstock import Pipeline
from penstock.ir import Action, Backward, BackwardInput, BackwardWeight, Forward, Overlap
from penstock.ir.action import compute_parts
from penstock.passes import add_sends
from penstock.runtime.measuring import profiler_ranges

BATCH = mlp_batch()
LETTERS = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}


class Range(NamedTuple):
    """A range of the exported trace, in microseconds."""

    name: str
    start: float
    end: float


def profiled(**options: Any) -> Any:
    """Return a profiler of all threads, which ranks of one process are."""
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere, **options)


def ranges_of(prof: Any, folder: Path) -> list[list[Range]]:
    """Return our ranges in the trace that a person opens, by thread and in time order."""
    path = folder / "trace.json"
    prof.export_chrome_trace(str(path))
    found = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "user_annotation" and event["ph"] == "X":
            one = Range(event["name"], event["ts"], event["ts"] + event["dur"])
            found[event["tid"]].append(one)
    return [sorted(ranges, key=lambda one: one.start) for ranges in found.values()]


def expected_names(order: list[Action], last: int) -> list[str]:
    """Return the names of computes, their losses, and sends, in the order in which they begin."""
    names = []
    for action in order:
        if message := getattr(action, "message", None):
            ends = f"stage {message.maker} to {message.taker}"
            names.append(f"send {message.kind} {ends} microbatch {message.mb}")
            continue
        for part in compute_parts(action):
            place = f"stage {part.stage} microbatch {part.mb}"
            names.append(f"{LETTERS[type(part)]} {place}")
            if isinstance(part, Forward) and part.stage == last:
                names.append(f"loss {place}")
    return names


@pytest.mark.parametrize("name", FOUR_STAGES)
def test_ranges_are_the_actions_of_each_rank_in_order(name: str, tmp_path: Path) -> None:
    schedule = FOUR_STAGES[name]
    modules = mlp()
    with profiled() as prof:
        actual = step_locally(modules, schedule, BATCH)
    assert_same(step_unsplit(modules, BATCH), actual)
    orders = add_sends(schedule).orders
    expected = [expected_names(order, schedule.num_stages - 1) for order in orders]
    threads = ranges_of(prof, tmp_path)
    found = [[one.name for one in ranges if "wait" not in one.name] for ranges in threads]
    assert sorted(expected) == sorted(found)
    averages = {row.key: row.count for row in prof.key_averages()}
    assert all(1 == averages[each] for names in expected for each in names)


def test_wait_for_each_message_comes_right_before_the_action_that_needs_it(
    tmp_path: Path,
) -> None:
    with profiled() as prof:
        step_locally(mlp(), FOUR_STAGES["ZB-H1"], BATCH)
    num_waits = 0
    for ranges in ranges_of(prof, tmp_path):
        names = [one.name for one in ranges]
        for name, following in itertools.pairwise(names):
            if not name.startswith("wait for the end"):
                words = name.split()
                if words[0] == "wait":
                    letter = "F" if "activation" in words else "I"
                    assert f"{letter} stage {words[-3]} microbatch {words[-1]}" == following
                    num_waits += 1
        assert "wait for the end of all sends" == names[-2]
    assert 2 * 3 * NUM_MICROBATCHES == num_waits


def test_ranges_do_not_overlap_but_for_the_loss_in_its_forward(tmp_path: Path) -> None:
    with profiled() as prof:
        step_locally(mlp(), FOUR_STAGES["DualPipeV"], BATCH)
    for ranges in ranges_of(prof, tmp_path):
        for one, following in itertools.pairwise(ranges):
            if following.name.startswith("loss"):
                assert one.name == following.name.replace("loss", "F")
                assert one.start <= following.start
                assert following.end <= one.end
                continue
            assert one.end <= following.start or one.name.startswith("loss")


def test_operations_of_a_stage_are_inside_its_range() -> None:
    with profiled() as prof:
        step_locally(mlp(), FOUR_STAGES["1F1B"], BATCH)
    parents = {event.cpu_parent.name for event in prof.events() if event.name == "aten::linear"}
    assert parents == {f"F stage {s} microbatch {mb}" for s in range(4) for mb in range(4)}


def test_profiler_in_the_thread_of_one_rank_shows_that_rank_alone(tmp_path: Path) -> None:
    def main(pipeline: Pipeline) -> list[list[Range]]:
        is_first = 0 in pipeline.stages
        alone = profile(activities=[ProfilerActivity.CPU])
        with alone if is_first else contextlib.nullcontext():
            pipeline.step(*BATCH.args, target=BATCH.target)
            pipeline.step(*BATCH.args, target=BATCH.target)
        return ranges_of(alone, tmp_path) if is_first else []

    (ranges,) = run_locally(mlp(), FOUR_STAGES["1F1B"], main)[0]
    computed = [one.name for one in ranges if one.name[1] == " "]
    order = FOUR_STAGES["1F1B"].orders[0]
    assert 2 * expected_names(list(order), 3) == computed


def test_step_that_is_recorded_and_profiled_has_both(tmp_path: Path) -> None:
    def main(pipeline: Pipeline) -> penstock.Recording:
        with penstock.record() as run:
            pipeline.step(*BATCH.args, target=BATCH.target)
        return run.recording

    with profiled() as prof:
        recording = run_locally(mlp(), FOUR_STAGES["ZB-V"], main)[0]
    assert FOUR_STAGES["ZB-V"] == recording.schedule
    num_ranges = sum(one.name[1] == " " for each in ranges_of(prof, tmp_path) for one in each)
    assert recording.schedule.num_actions == num_ranges


def test_halves_that_a_custom_function_runs_have_ranges(tmp_path: Path) -> None:
    def both(action: Action, context: Any) -> None:
        assert isinstance(action, Overlap)
        context.run(action.backward)
        context.run(action.forward)

    def main(pipeline: Pipeline) -> None:
        pipeline.register_custom_function(Overlap, both)
        pipeline.step(*BATCH.args, target=BATCH.target)

    schedule = FOUR_STAGES["DualPipeV"]
    with profiled() as prof:
        run_locally(mlp(), schedule, main)
    num_ranges = sum(one.name[1] == " " for each in ranges_of(prof, tmp_path) for one in each)
    assert sum(len(compute_parts(a)) for order in schedule.orders for a in order) == num_ranges


def test_step_without_a_profiler_enters_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(profiler_ranges, "record_function", entered.append)
    modules = mlp()
    assert_same(
        step_unsplit(modules, BATCH),
        step_locally(modules, FOUR_STAGES["DualPipeV"], BATCH, loss_fn=mean_square),
    )
    assert [] == entered


def test_evaluation_is_shown_too(tmp_path: Path) -> None:
    def main(pipeline: Pipeline) -> None:
        losses: list[torch.Tensor] = []
        pipeline.eval(*BATCH.args, target=BATCH.target, losses=losses)

    with profiled() as prof:
        run_locally(mlp(), FOUR_STAGES["1F1B"], main)
    letters = {one.name[0] for each in ranges_of(prof, tmp_path) for one in each}
    assert set("Flsw") == letters  # Forwards, losses, sends and waits.

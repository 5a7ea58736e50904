"""Recordings: what follows from timelines that were really run, and their text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import CostTable, Recording, Schedule, schedules, simulate
from penstock.errors import RecordError
from penstock.passes import Gathers, add_gathers
from penstock.passes.held_memory import Held, held_along
from penstock.timeline import RecordedStep, Timeline

COSTS = CostTable(
    forward=[1.0, 2.0, 1.5],
    backward_input=[2.0, 1.0, 1.0],
    backward_weight=[0.5, 1.5, 1.0],
    backward=[2.25, 2.0, 2.75],
    delay=[0.25, 0.5],
)


def make_step(name: str, costs: CostTable = COSTS, *, number: int = 0) -> RecordedStep:
    """A step that took exactly what the simulator says."""
    schedule = schedules.get(name)(num_ranks=3, num_microbatches=6)
    return RecordedStep(number, simulate(schedule, costs).timeline)


def scaled(step: RecordedStep, factor: float) -> RecordedStep:
    def times(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time * factor for time in row) for row in rows)

    timeline = step.timeline
    return RecordedStep(
        step.number, Timeline(timeline.schedule, times(timeline.starts), times(timeline.ends))
    )


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_simulating_with_the_recorded_costs_gives_the_recorded_times(name: str) -> None:
    step = make_step(name)
    recording = Recording((step,))
    simulated = recording.simulated().timeline
    for expected, actual in zip(step.timeline.ends, simulated.ends, strict=True):
        assert expected == pytest.approx(actual)
    assert recording.typical().makespan == pytest.approx(recording.simulated().makespan)


def test_costs_are_those_of_each_stage() -> None:
    costs = Recording((make_step("ZB-H1"),)).costs()
    assert COSTS.forward == pytest.approx(costs.forward)
    assert COSTS.backward_input == pytest.approx(costs.backward_input)
    assert COSTS.backward_weight == pytest.approx(costs.backward_weight)
    assert COSTS.delay == pytest.approx(costs.delay)
    assert (2.5, 2.5, 2.0) == pytest.approx(costs.backward)


@pytest.mark.parametrize("policy", [Gathers.once(), Gathers.per_need(ahead=0)], ids=str)
def test_gathers_and_reductions_are_recorded_beside_the_computes(policy: Gathers) -> None:
    costs = replace(COSTS, gather=(0.5, 3.25, 0.75), reduce=(1.25, 0.0, 2.0))
    schedule = add_gathers(schedules.get("ZB-H1")(num_ranks=3, num_microbatches=6), policy)
    recording = Recording((RecordedStep(0, simulate(schedule, costs).timeline),))
    assert recording == Recording.from_json(recording.to_json())
    assert costs.gather == pytest.approx(recording.costs().gather)
    assert costs.reduce == pytest.approx(recording.costs().reduce)
    assert costs.forward == pytest.approx(recording.costs().forward)


@pytest.mark.parametrize("cell", ["0UNSHARD", "0RESHARD", "0REDUCE_GRAD"])
def test_gather_that_ends_before_it_starts_is_rejected(cell: str) -> None:
    text = "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n"
    timeline = simulate(Schedule.from_csv(text)).timeline
    values = json.loads(Recording((RecordedStep(0, timeline),)).to_json())
    values["steps"][0]["starts"][0][text.strip().split(",").index(cell)] = 50.0
    with pytest.raises(RecordError, match="the times of rank 0 go backwards"):
        Recording.from_json(json.dumps(values))


def test_error_between_two_clocks_does_not_change_the_delays() -> None:
    timeline = make_step("ZB-H1").timeline

    def shifted(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return (*rows[:-1], tuple(time + 0.1 for time in rows[-1]))

    skewed = Timeline(timeline.schedule, shifted(timeline.starts), shifted(timeline.ends))
    assert COSTS.delay == pytest.approx(Recording((RecordedStep(0, skewed),)).costs().delay)


def test_costs_are_medians_which_a_slow_step_does_not_change() -> None:
    step = make_step("ZB-H1")
    costs = Recording((scaled(step, 10), step, step)).costs()
    assert COSTS.forward == pytest.approx(costs.forward)
    assert COSTS.delay == pytest.approx(costs.delay)


def test_halves_that_never_ran_are_half_of_the_backward_each() -> None:
    costs = Recording((make_step("1F1B"),)).costs()
    assert COSTS.backward == pytest.approx(costs.backward)
    assert [1.125, 1.0, 1.375] == pytest.approx(costs.backward_input)
    assert [1.125, 1.0, 1.375] == pytest.approx(costs.backward_weight)


def test_typical_step_is_the_one_of_median_time_among_those_of_the_commonest_schedule() -> None:
    usual = make_step("ZB-H1")
    other = scaled(make_step("1F1B"), 10)
    steps = [other, *(scaled(usual, factor) for factor in (3, 1, 2)), other]
    recording = Recording(tuple(steps))
    assert usual.timeline.schedule == recording.schedule
    expected = 2 * simulate(usual.timeline.schedule, COSTS).makespan
    assert expected == pytest.approx(recording.typical().makespan)


def test_later_schedule_counts_of_two_that_ran_as_often() -> None:
    first, second = make_step("1F1B"), make_step("ZB-H1", number=1)
    assert second.timeline.schedule == Recording((first, second)).schedule
    assert first.timeline.schedule == Recording((second, first)).schedule


def test_memory_is_counted_in_microbatches_unless_costs_are_given() -> None:
    recording = Recording((make_step("1F1B"),))
    assert 3 == recording.typical().peak_memory
    heavy = replace_memory(COSTS, 100.0)
    assert 300 == recording.typical(heavy).peak_memory


def replace_memory(costs: CostTable, amount: float) -> CostTable:
    return replace(costs, after_forward=(amount,) * 3, after_input=(amount,) * 3)


def test_recorded_inference_has_no_backward() -> None:
    schedule = schedules.get("ForwardOnly")(num_ranks=3, num_microbatches=4)
    recording = Recording((RecordedStep(0, simulate(schedule, COSTS).timeline),))
    assert (0, 0, 0) == recording.costs().backward
    assert recording == Recording.from_json(recording.to_json())


def test_text_gives_an_equal_recording() -> None:
    steps = [make_step("ZB-H1"), make_step("1F1B", number=1), make_step("ZB-H1", number=2)]
    recording = Recording(tuple(steps))
    assert recording == Recording.from_json(recording.to_json())
    assert 2 == len(json.loads(recording.to_json())["schedules"])


def test_file_gives_an_equal_recording(tmp_path: Path) -> None:
    recording = Recording((make_step("ZB-H1"),))
    recording.save(tmp_path / "run.json")
    assert recording == Recording.load(tmp_path / "run.json")


def test_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match=r"run.json cannot be read: "):
        Recording.load(path)


def test_recording_without_steps_is_rejected() -> None:
    with pytest.raises(RecordError, match=r"has no steps. Record at least one"):
        Recording(())


def spoil(path: list[Any], value: Any) -> str:
    """The text of a recording in which one value is another."""
    document = json.loads(Recording((make_step("1F1B"),)).to_json())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "penstock costs", "of the format 'penstock costs'. Expected 'penstock rec"),
        (["version"], 2, "of version 2. This Penstock reads version 1: record the run again"),
        (["schedules"], None, "schedules is None. Expected a list"),
        (["schedules", 0], "0F0\n1F0,1W0", "A schedule in the recording cannot be run: "),
        (["steps"], {}, "steps is {}. Expected a list"),
        (["steps", 0], 3, r"steps\[0\] lacks a number, a schedule or times. Expected what"),
        (["steps", 0, "schedule"], 1, r"steps\[0\] lacks a number, a schedule or times"),
        (["steps", 0, "starts"], [[0]], r"steps\[0\] does not have one start and one end for each"),
        (["steps", 0, "ends", 1], 4, r"steps\[0\] does not have one start and one end for each"),
        (["steps", 0, "ends", 1, 0], "1", r"steps\[0\] does not have one start and one end for"),
        (["steps", 0, "ends", 1, 0], float("nan"), r"steps\[0\] does not have one start and one"),
        (["steps", 0, "starts", 2, 0], -1, r"steps\[0\]: the times of rank 2 go backwards"),
        (["steps", 0, "ends", 1, 0], 1000, r"steps\[0\]: the times of rank 1 go backwards"),
    ],
)
def test_text_that_was_spoiled_is_rejected(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Recording.from_json(spoil(path, value))


def test_what_is_no_json_is_rejected() -> None:
    with pytest.raises(RecordError, match=r"not JSON: .* Expected what Recording.to_json\(\)"):
        Recording.from_json("{")


def test_repr_tells_the_typical_step() -> None:
    recording = Recording((make_step("1F1B"), make_step("1F1B", number=1)))
    assert f"Recording(2 steps, typical={recording.typical()!r})" == repr(recording)


HELD = tuple(
    tuple(Held(100 * rank + place + 5, 100 * rank + place) for place in range(12))
    for rank in range(3)
)


def test_measured_memory_is_in_the_report_and_in_the_text() -> None:
    recording = Recording((make_step("1F1B"),), HELD)
    report = recording.typical()
    assert (16, 116, 216) == report.measured_peaks
    curve = report.measured_memory(1)
    assert (0.0, 0.0) == curve[0]
    assert (100 + 11) == curve[-1].held
    assert report.timeline.starts[1][0] == curve[1].time
    assert [line.split()[-1] for line in str(report).splitlines()[1:]] == [
        "bytes",
        "16",
        "116",
        "216",
    ]
    assert recording == Recording.from_json(recording.to_json())
    assert () == recording.simulated().measured_peaks


def test_step_without_measured_memory_has_no_column_of_it() -> None:
    report = Recording((make_step("1F1B"),)).typical()
    assert () == report.measured_peaks
    assert [] == report.measured_memory(0)
    assert "measured" not in str(report)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_costs_from_measured_memory_hold_as_much_as_was_measured(name: str) -> None:
    costs = replace(
        COSTS,
        after_forward=(10.0, 20.0, 30.0),
        after_input=(4.0, 5.0, 30.0),
        during_forward=(12.0, 20.0, 31.0),
        during_input=(3.0, 2.0, 1.0),
        during_weight=(1.0, 2.0, 3.0),
        during_backward=(6.0, 7.0, 8.0),
    )
    step = make_step(name)
    schedule = step.timeline.schedule
    held = tuple(tuple(held_along(schedule, rank, costs)) for rank in range(3))
    recording = Recording((step,), held)
    found = recording.costs()
    assert costs.after_forward == found.after_forward
    assert costs.during_forward == found.during_forward
    if name == "ZB-H1":
        assert costs.after_input == found.after_input
        assert costs.during_weight == found.during_weight
    else:
        assert costs.during_backward == found.during_backward
    peaks = tuple(rank.peak_memory for rank in recording.simulated().ranks)
    assert peaks == recording.typical().measured_peaks


@pytest.mark.parametrize(
    "memory",
    [
        [],
        {"during": [[1.0]], "after": [[1.0]]},
        {"during": [[-1] * 12] * 3, "after": [[0] * 12] * 3},
    ],
    ids=["no amounts", "another shape", "negative"],
)
def test_file_with_broken_memory_is_refused(memory: Any) -> None:
    values = json.loads(Recording((make_step("1F1B"),)).to_json()) | {"memory": memory}
    with pytest.raises(RecordError, match="memory does not have two amounts for each action"):
        Recording.from_json(json.dumps(values))


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_costs_by_microbatch_have_the_scales_of_each(name: str) -> None:
    rows = [[1.0, 0.5, 2.0, 1.0, 1.0, 3.0], [1.0] * 6, [2.0, 1.0, 1.0, 1.0, 0.25, 1.0]]
    sizes = [1.0, 1.0, 2.0, 1.0, 0.5, 4.0]
    costs = replace(COSTS, time_scale=tuple(map(tuple, rows)), memory_scale=tuple(sizes))
    costs = replace(costs, after_forward=(3.0, 2.0, 1.0), during_input=(0.5, 1.0, 0.0))
    step = make_step(name, costs)
    schedule = step.timeline.schedule
    memory = tuple(tuple(held_along(schedule, rank, costs)) for rank in range(3))
    found = Recording((step,), memory).costs(by_microbatch=True)
    for expected, actual in zip(rows, found.time_scale, strict=True):
        assert expected == pytest.approx(actual)
    assert sizes == pytest.approx(found.memory_scale)
    assert (3.0, 2.0, 1.0) == pytest.approx(found.after_forward)
    simulated = simulate(schedule, found)
    assert simulate(schedule, costs).makespan == pytest.approx(simulated.makespan)
    assert simulate(schedule, costs).peak_memory == pytest.approx(simulated.peak_memory)
    assert () == Recording((step,), memory).costs().time_scale

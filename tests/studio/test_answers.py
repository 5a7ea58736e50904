"""What the page is told of what is typed in."""

import json
from dataclasses import replace

import pytest

from penstock import CostTable, Schedule, schedules, simulate
from penstock.draw.panel import Panel
from penstock.errors import FieldError
from penstock.schedules import names
from penstock.studio import answers
from penstock.studio.typed_inputs import Inputs, read_inputs

CSV, COSTS = answers.FILES["CSV"], answers.FILES["costs"]
CLOCKS = ("makespan", "span")


def shown(inputs: Inputs) -> list[answers.Shown]:
    found = answers.search(inputs) if "searched" in (inputs.schedule, inputs.beside) else None
    fields = {"schedule": inputs.schedule, "beside": inputs.beside}
    return [answers.make(inputs, field, name, found) for field, name in fields.items() if name]


def picture(**fields: str) -> answers.PictureData:
    inputs = read_inputs(fields)
    return answers.picture(inputs, shown(inputs), "q")


def rows(**fields: str) -> dict[str, answers.RowData]:
    found = list(answers.table(read_inputs(fields)))
    assert ["bound"] == list(found[-1])
    return {row["name"]: row for row in found[:-1] if "name" in row}


def test_every_registered_schedule_is_drawn_as_it_is_simulated() -> None:
    for name in names():
        page = picture(schedule=name, beside="", forward="2", delay="0.5")["page"]
        schedule = schedules.get(name)(num_ranks=4, num_microbatches=8)
        count = schedule.num_stages // 4
        costs = CostTable.uniform(schedule.num_stages, stages_per_rank=count, forward=2, delay=0.5)
        expected = simulate(schedule, costs).makespan
        assert [(name, expected)] == [
            (panel["title"], panel["timeline"]["makespan"]) for panel in page["panels"]
        ]


def test_two_schedules_are_drawn_under_each_other() -> None:
    page = picture(schedule="ZB-H1", beside="V-Min")["page"]
    assert ["ZB-H1", "V-Min"] == [panel["title"] for panel in page["panels"]]


def test_uneven_stages_are_drawn() -> None:
    first, last = (picture(schedule="1F1B", beside="", forward=text) for text in ("1", "1,1,1,3"))
    makespans = [one["page"]["panels"][0]["timeline"]["makespan"] for one in (first, last)]
    assert makespans[0] < makespans[1]


def test_memory_is_a_line_for_each_rank_and_what_is_over_it_is_noted() -> None:
    found = picture(schedule="GPipe", beside="V-Min", memory="4")
    assert [[4.0] * 4] * 2 == [panel["caps"] for panel in found["page"]["panels"]]
    assert ["GPipe needs 8 on rank 0: more than the cap."] == found["notes"]


def test_memory_may_be_different_for_each_rank() -> None:
    found = picture(schedule="1F1B", beside="", memory="4,3,2,1")
    assert [4.0, 3.0, 2.0, 1.0] == found["page"]["panels"][0]["caps"]
    assert [] == found["notes"]


def test_memory_in_which_nothing_fits_is_a_problem_of_its_field() -> None:
    with pytest.raises(FieldError, match=r"Nothing fits: rank 0 may hold 0\.5") as caught:
        answers.check_memory(read_inputs({"memory": "0.5"}))
    assert ["memory"] == list(caught.value.problems)


@pytest.mark.parametrize("field", ["schedule", "beside"])
def test_schedule_that_cannot_be_made_is_a_problem_of_its_field(field: str) -> None:
    with pytest.raises(FieldError, match="DualPipeV needs at least 8") as caught:
        picture(microbatches="3", **{field: "DualPipeV"})
    assert [field] == list(caught.value.problems)


def test_stages_per_rank_are_for_schedules_that_take_any_number() -> None:
    inputs = read_inputs({"schedule": "Interleaved1F1B", "beside": "ZB-V", "stages_per_rank": "3"})
    assert [12, 8] == [one.schedule.num_stages for one in shown(inputs)]


def test_searched_schedule_is_no_slower_than_any_that_fits() -> None:
    inputs = read_inputs({"schedule": "searched", "memory": "3", "forward": "1,1,2"})
    result = answers.search(inputs)
    found = answers.searched_row(inputs, result)
    fitting = [row["time"] for row in rows(memory="3", forward="1,1,2").values() if row["fits"]]
    assert found["time"] is not None
    assert found["time"] <= min(time for time in fitting if time is not None)
    assert "schedules were tried in" in found["note"]
    assert "limits the step" in answers.advise(inputs, result)["advice"][0]


def test_recomputations_of_the_searched_schedule_are_drawn_and_said() -> None:
    fields = {"schedule": "searched", "beside": "1F1B", "memory": "1.6", "after_input": "0.4"}
    found = picture(**fields, recompute="yes")
    [said] = found["said"]
    assert "recompute" in said
    assert "of 8 forwards of" in said
    assert "recomputation" in json.dumps(found["page"])
    assert [] == picture(**fields)["said"]


def test_microbatches_that_differ_are_drawn_with_their_lengths_and_order() -> None:
    lengths = {"lengths": "3072,1024,2048,512", "microbatches": "4"}
    found = picture(schedule="searched", beside="1F1B", **lengths)
    [said] = found["said"]
    assert said.startswith("Microbatches run in the order ")
    alike, sized = (picture(schedule="1F1B", beside="", **one) for one in ({}, lengths))
    assert alike["page"]["panels"][0] != sized["page"]["panels"][0]
    assert [] == sized["said"]


def test_microbatches_that_differ_may_be_recomputed() -> None:
    fields = {"lengths": "4,1,2,1", "microbatches": "4", "ranks": "2", "memory": "2"}
    inputs = read_inputs({**fields, "schedule": "searched", "recompute": "yes"})
    answers.check_memory(inputs)
    [one] = shown(replace(inputs, beside=""))
    assert "" == one.excess
    assert 2 == len(answers.picture(inputs, [one], "q")["said"])


def test_bound_allows_recomputation_if_searches_do() -> None:
    fields = {"memory": "1", "ranks": "2", "microbatches": "4", "after_input": "0.1"}
    bounds = [
        line["bound"]
        for choice in ("no", "yes")
        for line in answers.table(read_inputs({**fields, "recompute": choice}))
        if "bound" in line
    ]
    assert bounds[0] != bounds[1]


def test_table_has_every_registered_schedule_in_words() -> None:
    found = rows()
    assert names() == list(found)
    assert ["25.5", "5.88%", "4", "0.00%", "V, 2 per rank"] == found["ZB-V"]["cells"]
    assert (True, 25.5, 4.0, "") == tuple(
        found["ZB-V"][key] for key in ("fits", "time", "peak", "why")
    )


def test_table_says_why_a_schedule_is_not_compared() -> None:
    found = rows(memory="4", microbatches="7")
    assert "needs 8 microbatches" == found["DualPipeV"]["why"]
    assert "needs 7 on rank 0" == found["GPipe"]["why"]
    assert "has no backward" == found["ForwardOnly"]["why"]
    assert ([], None) == (found["ForwardOnly"]["cells"], found["ForwardOnly"]["time"])
    assert not any(found[name]["fits"] for name in ("DualPipeV", "GPipe", "ForwardOnly"))


def test_table_counts_by_the_clock() -> None:
    assert ("25.5", "24") == tuple(rows(clock=clock)["ZB-V"]["cells"][0] for clock in CLOCKS)


def test_gap_is_told_of_those_that_fit() -> None:
    found = rows(memory="4")
    assert ("22.22%", "") == (found["1F1B"]["cells"][3], found["GPipe"]["cells"][3])


def test_memory_that_is_enough_for_some_placements_is_no_problem() -> None:
    # A microbatch holds 1.5 and 3.5 on the ranks of a line, and 2.5 on each of a V.
    inputs = read_inputs({"ranks": "2", "memory": "2.5", "activation": "1,2,3,4"})
    answers.check_memory(inputs)
    assert "V, 2 per rank" == answers.searched_row(inputs, answers.search(inputs))["cells"][-1]


def test_search_that_is_stopped_says_so() -> None:
    inputs = read_inputs({"ranks": "8", "microbatches": "32", "forward": "1,1.3", "memory": "5"})
    found = answers.search(replace(inputs, seconds=0.01))
    assert answers.searched_row(inputs, found)["note"].endswith("s, when the time ran out.")


def test_known_units_are_shown() -> None:
    found = rows(units="seconds and bytes", forward="0.001", activation="2048")
    assert "22.01 s" == found["1F1B"]["cells"][0]
    assert "8 KiB" == found["1F1B"]["cells"][2]


@pytest.mark.parametrize("field", ["activation", "after_input"])
def test_memory_of_which_next_to_nothing_is_held_is_compared(field: str) -> None:
    # The number of microbatches that fit was more than a float holds.
    fields = {field: "5e-324", "memory": "1e15"}
    assert all(row["fits"] for row in rows(**fields).values() if row["cells"])


@pytest.mark.parametrize("cost", ["0", "1e15"])
def test_costs_of_any_size_are_compared(cost: str) -> None:
    fields = dict.fromkeys(("forward", "backward_input", "backward_weight"), cost)
    json.dumps([rows(**fields), picture(**fields)], allow_nan=False)


def test_one_rank_and_one_microbatch_can_be_drawn() -> None:
    page = picture(ranks="1", microbatches="1", schedule="1F1B", beside="GPipe")["page"]
    assert [3.0, 3.0] == [panel["timeline"]["makespan"] for panel in page["panels"]]


def test_files_are_named_after_what_is_drawn() -> None:
    hrefs = [file["href"] for file in picture(schedule="ZB-H1", ranks="2")["files"]]
    assert "/files/zb-h1_p2_m8.csv?q" == hrefs[0]
    assert len(answers.FILES) == len({*hrefs})


def test_csv_and_costs_give_back_what_is_drawn() -> None:
    inputs = read_inputs({"schedule": "V-Half", "forward": "1,2", "delay": "0.3"})
    drawn = shown(inputs)
    schedule, costs = (answers.file(inputs.question, drawn, f"a{end}") for end in (CSV, COSTS))
    report = simulate(Schedule.from_csv(schedule.decode()), CostTable.from_json(costs.decode()))
    assert drawn[0].report.makespan == report.makespan


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (".svg", b"<?xml"),
        (".png", b"\x89PNG"),
        (".html", b"<!doctype html>"),
        ("_trace.json", b"{"),
    ],
)
def test_drawings_are_files_of_their_kind(ending: str, expected: bytes) -> None:
    inputs = read_inputs({"ranks": "2", "microbatches": "2"})
    assert answers.file(inputs.question, shown(inputs), f"a{ending}").startswith(expected)


def test_panels_have_the_units_that_are_chosen() -> None:
    inputs = read_inputs({"units": "seconds"})
    [panel] = answers.panels(inputs.question, shown(inputs)[:1])
    assert Panel("ZB-V", panel.report, time_unit="s") == panel

"""The Python that the page shows makes what the page draws."""

import pytest

from penstock.studio import answers
from penstock.studio.typed_inputs import read_inputs

# Searched to the end in a part of the time that there is.
SMALL = {"schedule": "searched", "ranks": "2", "microbatches": "4"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"schedule": "V-Half", "forward": "1,1,2", "activation": "1,2", "after_input": "0.5"},
        {"schedule": "Interleaved1F1B", "stages_per_rank": "3", "delay": "0.25"},
        {"schedule": "1F1B", "backward": "1.5,1.7"},
        {"schedule": "DualPipeV", "overlap_saving": "0.5", "backward_weight": "0.7"},
        {"schedule": "searched", "memory": "4,4,3,3", "clock": "span"},
        {"lengths": "3,1,2", "microbatches": "3", "work": "1,0.5"},
        {"schedule": "searched", "lengths": "3,1,2", "microbatches": "3", "forward": "1,1,2"},
        {**SMALL, "memory": "1.5", "recompute": "yes", "recompute_time": "0.5"},
        {**SMALL, "memory": "1.6", "recompute": "yes", "after_dropping": "0.2"},
        {"schedule": "searched", "stages_per_rank": "3", "ranks": "1", "forward": "1,5"},
    ],
)
def test_text_makes_the_schedule_and_its_report(
    fields: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = read_inputs(fields)
    found = answers.search(inputs)
    shown = answers.make(inputs, "schedule", inputs.schedule, found)
    names: dict[str, object] = {}
    exec(answers.picture(inputs, [shown], "")["python"], names)
    assert shown.schedule == names["schedule"]
    assert f"{shown.report}\n" == capsys.readouterr().out


def test_equal_values_are_written_in_short() -> None:
    inputs = read_inputs({"schedule": "1F1B"})
    shown = answers.make(inputs, "schedule", "1F1B", None)
    text = answers.picture(inputs, [shown], "")["python"]
    assert "forward=[1.0] * 4" in text
    assert 'schedule = penstock.schedules.get("1F1B")(num_ranks=4, num_microbatches=8)\n' in text
    assert max(map(len, text.splitlines())) <= 100

"""`penstock demo` up to where it starts processes, and what it makes of two trainings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run

import penstock.cli.demo_command as module
from penstock import Recording
from penstock.cli.demo_report import Progress, report, sparkline
from penstock.cli.screen import console
from penstock.costs import CostTable
from penstock.schedules import get
from penstock.sim import simulate
from penstock.timeline import RecordedStep
from penstock.training.gpt_sizes import GptConfig
from penstock.training.launching import Attempt
from penstock.training.settings import TrainConfig
from penstock.training.side_by_side import Contender
from penstock.training.trainer import StepDone


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--schedule", "ZBV2"], "There is no schedule named 'ZBV2'. Did you mean ZB-V?"),
        (["--schedule", "auto"], "--schedule is auto, but 1F1B must be compared with another"),
        (["--schedule", "1f1b"], "--schedule is 1f1b, but 1F1B must be compared with another"),
        (["--schedule", "Schedule1F1B"], "--schedule is Schedule1F1B, but 1F1B must be compared"),
        (["--steps", "0"], "--steps is 0. Expected a whole number, at least 1."),
        (["--ranks", "-1"], "--ranks is -1. Expected a whole number, at least 1."),
        (["--microbatches", "0"], "--microbatches is 0. Expected a whole number, at least 1."),
        (["--ranks", "8"], "ZB-V on 8 ranks has 16 stages, but a model of 8 layers can be cut"),
        (["--folder", "file/folder"], "--folder is file/folder, which cannot be made: Not a dir"),
    ],
)
def test_option_that_cannot_be_used_is_told_in_one_line_before_anything_starts(
    args: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(module, "start_ranks", lambda *given: pytest.fail("it was started"))
    assert run("demo", *args).error.startswith(expected)


def test_each_rank_gets_the_options_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Attempt] = []
    monkeypatch.setattr(module, "start_ranks", lambda first: started.append(first) or 7)
    args = [
        "--steps=7",
        "--schedule=ZB-H1",
        "--ranks=3",
        "--microbatches=5",
        f"--folder={tmp_path / 'new' / 'folder'}",
    ]
    assert 7 == run("demo", *args).code
    assert [(["demo", *args], 3, 0, False)] == started
    assert (tmp_path / "new" / "folder").is_dir()


def make_contender(name: str, *, f: float, losses: list[float]) -> Contender:
    """A training whose steps took what the simulator says, and half as long again as that."""
    schedule = get(name)(num_ranks=2, num_microbatches=4)
    per_rank = schedule.num_stages // 2
    costs = CostTable.uniform(
        schedule.num_stages,
        stages_per_rank=per_rank,
        forward=f,
        backward_input=f,
        backward_weight=f,
    )
    timeline = simulate(schedule, costs).timeline
    makespan = max(map(max, timeline.ends))
    steps = [
        StepDone(number, loss, 1.5 * makespan, 100 / makespan)
        for number, loss in enumerate(losses, start=1)
    ]
    return Contender(name, tuple(steps), Recording((RecordedStep(0, timeline),)))


def test_report_compares_losses_bubbles_and_speed_and_names_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contenders = [
        make_contender("1F1B", f=0.01, losses=[5.0, 4.0, 3.0]),
        make_contender("ZB-V", f=0.01, losses=[5.0, 4.002, 3.0]),
    ]
    report(contenders, tmp_path, console(100))
    printed = capsys.readouterr().out
    assert "1F1B, measured" in printed
    assert "loss, ZB-V  5.000 █▅▁ 3.000" in printed
    assert "The two losses differ by at most 0.002 in any step." in printed
    baseline, other = (
        line.split() for line in printed.splitlines() if line.startswith(("1F1B ", "ZB-V "))
    )
    # (p - 1) / (m + p - 1) of 1F1B is 1 / 5; a fully filled ZB-V waits half a forward of 12.5.
    assert ["1F1B", "225", "ms", "667", "20.0%", "20.0%", "1.00"] == baseline
    assert ["ZB-V", "188", "ms", "800", "4.0%", "4.0%", "1.20"] == other
    names = ["figures.json", "loss.png", "timeline.html", "timeline.png", "trace.json"]
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert all(name in printed for name in names)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert ["1F1B", "ZB-V"] == [figure["schedule"] for figure in figures]
    assert pytest.approx(0.2) == figures[0]["measured_bubble"]


def test_progress_is_some_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = TrainConfig(GptConfig(num_layers=4, width=16, num_heads=2, context=8), steps=12)
    configs = [replace(plain, schedule=name) for name in ("1F1B", "ZB-V")]
    with Progress(configs, console(100), is_shown=True) as progress:
        for number in range(1, 13):
            for name in ("1F1B", "ZB-V"):
                progress.show(name, StepDone(number, 3.0, 0.5, 256.0))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("on 2 processes, by 1F1B and by ZB-V in turn.")
    assert [1, 2, 4, 6, 8, 10, 12] == [int(line.split()[1]) for line in lines]
    assert lines[0].endswith("loss 3.000  1F1B: 256 tokens/s  ZB-V: 256 tokens/s")


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plain = TrainConfig(GptConfig(num_layers=4, width=16, num_heads=2, context=8))
    with Progress([plain], console(100), is_shown=False) as progress:
        progress.show(plain.schedule, StepDone(1, 3.0, 0.5, 256.0))
    assert "" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0], "▁"), ([8, 7, 6, 5, 4, 3, 2, 1], "█▇▆▅▄▃▂▁"), ([2, 2, 0, 0, 1, 1], "█▁▅")],
)
def test_sparkline_is_as_wide_as_it_may_be(values: list[float], expected: str) -> None:
    assert expected == sparkline(values, max(len(expected), 1))

"""`penstock train` up to where it starts processes, and what it shows of a training."""

import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from command_line import run

import penstock.cli.train_command as module
from limits import PROCESS_S
from penstock import schedules
from penstock.cli.train_display import Bar, JsonLines, Lines, Silence, make_display
from penstock.training.gpt_sizes import GptConfig
from penstock.training.held_out import Evaluated
from penstock.training.launching import Attempt
from penstock.training.settings import TrainConfig
from penstock.training.trainer import StepDone, Trained
from penstock.training.watching import Seen

TINY = TrainConfig(GptConfig(num_layers=4, width=16, num_heads=2, context=8), steps=100)
SCHEDULE = schedules.get("ZB-V")(num_ranks=2, num_microbatches=8)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--schedule", "ZBV2"], "There is no schedule named 'ZBV2'. Did you mean ZB-V?"),
        (["--schedule", "missing.csv"], "the schedule missing.csv cannot be read: "),
        (["--model", "tinny"], "--model is 'tinny'. Did you mean tiny?"),
        (["--size", "tinny"], "--model is 'tinny'. Did you mean tiny?"),
        (["run.toml"], "run.toml has the key 'modle', which is not an option. Did you mean model?"),
        (["--ranks", "0"], "--ranks is 0. Expected a whole number, at least 1."),
        (["--steps", "-5"], "--steps is -5. Expected a whole number, at least 1."),
        (["--batch", "10"], "--batch is 10, which cannot be cut into 8 equal microbatches."),
        (["--ranks", "8"], "ZB-V on 8 ranks has 16 stages, but a model of 8 layers can be cut"),
        (
            ["--text", "missing"],
            "--data is missing, which cannot be read: No such file or directory.",
        ),
        (["--checkpoint", "file/folder"], "checkpoints cannot be written to file/folder: Not a"),
        (["--checkpoint", "empty", "--resume"], "there is no checkpoint in empty, so there is"),
        (["--resume"], "--resume is given without --checkpoint."),
        (["--lr", "fast"], "Invalid value for '--lr'"),
    ],
)
def test_option_that_cannot_be_used_is_told_in_one_line_before_anything_starts(
    args: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("empty").mkdir()
    Path("run.toml").write_text("modle = 'tiny'")
    monkeypatch.setattr(module, "start_ranks", lambda *given: pytest.fail("it was started"))
    assert run("train", *args).error.startswith(expected)


def test_options_are_checked_without_torch() -> None:
    code = (
        "import sys\n"
        "from penstock.cli import main\n"
        "try:\n"
        "    main(['train', '--batch', '10'])\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S
    )
    assert (1, "False\n") == (done.returncode, done.stdout)
    assert done.stderr.startswith("error: --batch is 10")


def test_each_rank_gets_the_options_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "some text"
    text.write_bytes(b"a" * 100)
    started: list[Attempt] = []

    def note(first: Attempt, go_on: object) -> int:
        started.append(first)
        return 7

    monkeypatch.setattr(module, "start_ranks", note)
    for package in ("tensorboard", "wandb"):  # It is enough that they can be found.
        found = ModuleType(package)
        found.__spec__ = ModuleSpec(package, None)
        monkeypatch.setitem(sys.modules, package, found)
    given = {
        "--layers": "9",
        "--width": "24",
        "--heads": "3",
        "--context": "12",
        "--data": str(text),
        "--tokenizer": str(text),
        "--ranks": "3",
        "--replicas": "2",
        "--shards": "1",
        "--schedule": "Interleaved1F1B",
        "--stages-per-rank": "3",
        "--microbatches": "5",
        "--batch": "20",
        "--accumulate": "2",
        "--steps": "77",
        "--lr": "0.25",
        "--min-lr": "0.125",
        "--warmup": "7",
        "--weight-decay": "0.5",
        "--clip": "1.5",
        "--dtype": "float32",
        "--autocast": "bfloat16",
        "--seed": "4",
        "--eval-every": "5",
        "--eval-share": "0.25",
        "--eval-batches": "3",
        "--checkpoint": str(tmp_path / "run"),
        "--every": "11",
        "--keep": "3",
        "--restarts": "2",
        "--min-ranks": "1",
        "--spares": "1",
        "--snapshot-every": "5",
        "--sample": "some text",
        "--record": str(tmp_path / "run.json"),
        "--log": str(tmp_path / "log.jsonl"),
        "--tensorboard": str(tmp_path / "board"),
        "--wandb": "project",
        "--memory": "8GiB",
    }
    args = [f"{name}={value}" for name, value in given.items()]
    args += ["--force"]
    assert 7 == run("train", *args, "--json").code
    assert [(["train", *args, "--json"], 6, 1, False)] == started
    run(*started[0].arguments)
    assert started[0] == started[1]


def test_options_in_a_file_are_as_on_the_command_line_which_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Attempt] = []
    monkeypatch.setattr(module, "start_ranks", lambda first, _: started.append(first) or 0)
    path = tmp_path / "run.toml"
    path.write_text('model = "tiny"\nsteps = 5\nclip = 1\nranks = 1\n')
    run("train", path, "--steps=7")
    run("train", "--model=tiny", "--clip=1", "--ranks=1", "--steps=7")
    assert started[0] == started[1]


def test_interrupted_training_says_where_it_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_interrupted(first: Attempt, go_on: object) -> int:
        (tmp_path / "step-000100").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "start_ranks", be_interrupted)
    ran = run("train", "--checkpoint", tmp_path)
    assert (130, "--resume continues from step 100; later ones are lost\ninterrupted\n") == (
        ran.code,
        ran.err,
    )


def steps(count: int) -> list[StepDone]:
    seen = Seen(bubble=0.125, memory_bytes=300 * 2**20)
    return [
        StepDone(number, 3.0 + 1 / number, 0.5, 256.0, 0.1, seen=seen if number == 5 else None)
        for number in range(1, count + 1)
    ]


def test_lines_are_some_of_the_steps_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(TINY, is_json=False, is_first=True)
    assert isinstance(display, Lines)
    display.begin()
    for done in steps(100):
        display.show(done)
    display.show_evaluated(Evaluated(100, 0.0))
    display.end(Trained(tuple(steps(100)), SCHEDULE, sample="to be continued"))
    first, *shown, evaluated, loss, schedule, sample = capsys.readouterr().out.splitlines()
    assert "training 21,472 parameters (4 layers) in 4 stages on 2 ranks by ZB-V" == first
    assert [1, *range(5, 101, 5)] == [int(line.split()[1]) for line in shown]
    assert "step   1  loss 4.0000  256 tokens/s" == shown[0]
    assert "step   5  loss 3.2000  256 tokens/s  bubble 12.5%  300 MiB  0:00 left" == shown[1]
    assert "step 100  loss 3.0100  256 tokens/s  bubble 12.5%  300 MiB" == shown[-1]
    assert "step 100  held out: loss 0.0000, perplexity 1.00" == evaluated
    assert "loss 3.0100 in step 100, 256 tokens/s (median)" == loss
    assert "schedule ZB-V, bubble 12.5% (measured)" == schedule
    assert "sample: to be continued" == sample


def test_schedule_that_was_found_is_not_judged_by_equal_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Lines(TrainConfig(TINY.model, schedule="auto", steps=2))
    display.end(Trained(tuple(steps(2)), SCHEDULE))
    assert "schedule auto, found in the first steps: ZB-V\n" in capsys.readouterr().out


def test_bar_ends_with_where_everything_is(capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig(TINY.model, steps=2, checkpoint="runs", record="run.json")
    display = Bar(config)
    display.begin()
    for done in steps(2):
        display.show(done)
    display.show_evaluated(Evaluated(2, 0.0))
    display.end(Trained(tuple(steps(2)), SCHEDULE))
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    assert "loss 3.5000  256 tokens/s" in printed
    assert "held out: loss 0.0000, perplexity 1.00" in printed
    *_, checkpoint, recording = printed.splitlines()
    assert "checkpoint runs/step-000002" == checkpoint
    assert 'recording run.json: view it with "penstock show run.json"' == recording


@pytest.mark.parametrize("kind", [Lines, Bar])
def test_training_that_failed_has_no_summary(
    kind: type[Lines] | type[Bar], capsys: pytest.CaptureFixture[str]
) -> None:
    display = kind(TINY)
    display.begin()
    display.end(None)
    assert "median" not in capsys.readouterr().out


def test_json_is_one_object_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(TINY, is_json=True, is_first=True)
    assert isinstance(display, JsonLines)
    display.begin()
    for done in steps(2):
        display.show(done)
    display.show_evaluated(Evaluated(2, 0.0))
    display.end(Trained(tuple(steps(2)), SCHEDULE))
    expected = [
        {"step": 1, "loss": 4.0, "lr": 0.1, "duration_s": 0.5, "tokens_per_s": 256.0},
        {"step": 2, "loss": 3.5, "lr": 0.1, "duration_s": 0.5, "tokens_per_s": 256.0},
        {"step": 2, "eval_loss": 0.0, "perplexity": 1.0},
    ]
    assert expected == [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(TINY, is_json=True, is_first=False)
    assert isinstance(display, Silence)
    display.begin()
    display.show(steps(1)[0])
    display.show_evaluated(Evaluated(1, 0.0))
    display.end(None)
    assert "" == capsys.readouterr().out

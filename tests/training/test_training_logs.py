"""What a run leaves for other programs to read."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from small_runs import PLAIN, run

from penstock.training.held_out import Evaluated
from penstock.training.log_sinks import Logs
from penstock.training.trainer import StepDone
from penstock.training.watching import Seen

DONE = StepDone(3, 2.5, 0.5, 128.0, 0.1, 1.5, Seen(0.25, 1000))


def test_json_lines_have_each_step_and_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    logs = Logs(replace(PLAIN, log=str(path)))
    logs.step(DONE)
    logs.evaluated(Evaluated(3, 0.0))
    logs.step(StepDone(4, 2.25, 0.5, 128.0, 0.1))
    logs.close()
    first, evaluated, plain = map(json.loads, path.read_text().splitlines())
    speed = {"lr": 0.1, "duration_s": 0.5, "tokens_per_s": 128.0}
    measured = {"grad_norm": 1.5, "memory_bytes": 1000, "bubble": 0.25}
    assert {"step": 3, "loss": 2.5, **speed, **measured} == first
    assert {"step": 3, "eval_loss": 0.0, "perplexity": 1.0} == evaluated
    assert {"step": 4, "loss": 2.25, **speed} == plain


def test_resumed_run_goes_on_after_the_lines_of_its_checkpoint(tmp_path: Path) -> None:
    run(checkpoint=str(tmp_path / "run"), steps=2, num_ranks=1)
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    resumed = replace(PLAIN, log=str(path), checkpoint=str(tmp_path / "run"), resume=True)
    logs = Logs(resumed)
    logs.step(DONE)
    logs.close()
    assert [1, 2, 3] == [json.loads(line)["step"] for line in path.read_text().splitlines()]
    Logs(replace(resumed, resume=False)).close()
    assert "" == path.read_text()


class Writer:
    """What the tests need of the writers of TensorBoard and wandb."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.got: list[Any] = [args or options]

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.got.append((name, value, step))

    def log(self, figures: dict[str, float], step: int) -> None:
        self.got.append((figures, step))

    def close(self) -> None:
        self.got.append("closed")

    finish = close


def test_tensorboard_and_wandb_get_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Writer] = []

    def make(*args: Any, **options: Any) -> Writer:
        made.append(Writer(*args, **options))
        return made[-1]

    for name, function in (("torch.utils.tensorboard", "SummaryWriter"), ("wandb", "init")):
        module = ModuleType(name)
        setattr(module, function, make)
        monkeypatch.setitem(sys.modules, name, module)
    logs = Logs(replace(PLAIN, tensorboard="board", wandb="project"))
    logs.evaluated(Evaluated(3, 0.0))
    logs.close()
    board, online = (writer.got for writer in made)
    assert [("board",), ("eval_loss", 0.0, 3), ("perplexity", 1.0, 3), "closed"] == board
    assert ({"eval_loss": 0.0, "perplexity": 1.0}, 3) == online[1]
    assert ("project", 0.01) == (online[0]["project"], online[0]["config"]["lr"])

"""The last checkpoint of a training, as a folder for transformers."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import run
from transformers import AutoModelForCausalLM

import penstock.cli.export_command as module
from penstock.cli import main as run_command
from penstock.comm import LocalGroup, local_ranks
from penstock.errors import OptionError
from penstock.training.export_choice import choose_export
from penstock.training.exporting import export_checkpoint
from penstock.training.model_sources import HuggingFaceModel

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def once_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    source = folder / "llama"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA))
    (source / "tokenizer_config.json").write_text("{}")
    model = HuggingFaceModel(str(source), 8)
    run(model=model, checkpoint=str(folder / "runs"), steps=2, num_ranks=1)
    return folder


@pytest.fixture
def trained(once_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model in `llama`, trained for two steps, whose checkpoints are in `runs`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(once_trained, tmp_path, dirs_exist_ok=True)
    said = tmp_path / "runs" / "step-000002" / "training.json"
    said.write_text(said.read_text().replace(str(once_trained), str(tmp_path)))
    return tmp_path


def export_on(num_ranks: int, folder: str) -> dict[str, Any]:
    chosen = choose_export("runs", folder, num_ranks, {})

    def main(group: LocalGroup) -> None:
        export_checkpoint(chosen, group=group)

    local_ranks(num_ranks, main)
    state: dict[str, Any] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def test_exported_model_is_the_same_on_any_number_of_ranks(trained: Path) -> None:
    whole, parts = export_on(1, "whole"), export_on(2, "parts")
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert json.loads(Path("whole/config.json").read_text())["use_cache"] is True
    assert "exporting step 2 of runs on 2 ranks" == str(choose_export("runs", "any", 2, {}))


def test_export_neither_needs_the_data_nor_changes_the_training(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read Python's library in place of the data, and printed the memory of a training."""
    before = sorted(path.name for path in Path("runs").iterdir())
    started: list[list[str]] = []
    monkeypatch.setattr(
        module, "start_ranks", lambda first: started.append(list(first.arguments)) or 0
    )
    monkeypatch.setattr("penstock.training.choices.read_documents", pytest.fail)
    with pytest.raises(SystemExit, match="0"):
        run_command(["export", "runs", "exported"])
    assert [["export", "runs", "exported", "--ranks=1"]] == started
    assert before == sorted(path.name for path in Path("runs").iterdir())


def test_first_rank_prints_what_was_exported(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0" if name == "RANK" else "1")
    monkeypatch.setattr("penstock.training.exporting.export_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr("penstock.training.worker.joined", nullcontext)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        run_command(["export", "runs", "exported"])
    lines = capsys.readouterr().out.splitlines()
    assert ["exporting step 2 of runs on 1 rank", "exported to exported, for transformers"] == lines


def test_export_of_nothing_is_refused(tmp_path: Path) -> None:
    message = r"there is no checkpoint in .*\. Expected the folder of a training: the one that `pen"
    with pytest.raises(OptionError, match=message):
        choose_export(str(tmp_path), "exported", None, {})


def test_model_that_is_not_of_transformers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(checkpoint="runs", steps=1, num_ranks=1)
    message = r"^the training in runs is of the GPT of Penstock, which is not a model of transform"
    with pytest.raises(OptionError, match=message):
        choose_export("runs", "exported", None, {})


def test_model_or_tokenizer_that_is_not_the_trained_one_is_refused(trained: Path) -> None:
    config = Path("llama/config.json")
    config.write_text(json.dumps({**LLAMA, "hidden_size": 32}))
    message = r"the model of the training in runs has changed since, .*: .*config\.json\. Put back"
    with pytest.raises(OptionError, match=message):
        choose_export("runs", "exported", None, {})
    config.write_text(json.dumps(LLAMA))
    Path("llama/tokenizer.json").write_text("{}")
    with pytest.raises(OptionError, match="the tokenizer of the training in runs has changed"):
        choose_export("runs", "exported", None, {})
    shutil.rmtree("llama")
    message = r"is of the model in .*llama, which is not there any more\. Put it back"
    with pytest.raises(OptionError, match=message):
        choose_export("runs", "exported", None, {})


def test_errors_of_export_name_no_option_of_train(trained: Path) -> None:
    Path("runs/step-000002/training.json").write_text("{}")
    with pytest.raises(OptionError, match=r"Remove .*step-000002 to use the previous checkpoint"):
        choose_export("runs", "exported", None, {})


def test_folder_that_cannot_be_completed_is_told(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("penstock.training.exporting._restore_cache", is_full)
    message = "exported has the weights, but its tokenizer and configuration cannot be completed"
    with pytest.raises(OptionError, match=message):
        export_on(1, "exported")

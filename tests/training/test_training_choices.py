"""From options on the command line, in a file and in a checkpoint to the config of a run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import MODEL, run

from penstock import schedules
from penstock.errors import OptionError
from penstock.training.choices import Data, check_run, make_config
from penstock.training.documents import read_documents
from penstock.training.gpt_sizes import SIZES, GptConfig
from penstock.training.model_sources import HuggingFaceModel, OwnModel, find_model
from penstock.training.run_files import known_options, read_options
from penstock.training.settings import TrainConfig


def test_what_is_left_out_has_its_default() -> None:
    assert TrainConfig(SIZES["small"]) == make_config({}, {})


def test_sizes_can_be_changed_one_by_one() -> None:
    config = make_config({"model": "tiny", "layers": 6, "heads": 2}, {})
    assert GptConfig(num_layers=6, width=64, num_heads=2, context=64) == config.model


def test_model_is_a_size_a_folder_a_file_or_a_function(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    folder = HuggingFaceModel(str(tmp_path), 64)
    assert folder == find_model({"model": str(tmp_path)})
    assert HuggingFaceModel(str(file), 32) == find_model({"model": str(file), "context": 32})
    assert OwnModel("mine:make", 256) == find_model({"model": "mine:make"})
    assert (False, None) == (folder.has_weights, folder.tokenizer_file)
    assert "llama, with random weights" in str(folder)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    assert (True, tmp_path / "tokenizer.json") == (folder.has_weights, folder.tokenizer_file)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": "Tini"}, r"--model is 'Tini'. Did you mean tiny\?"),
        ({"model": "."}, r"--model is \., which has no config.json"),
        ({"model": "folder", "context": 99}, "--context is 99, but the model in folder reads at"),
        ({"model": "folder", "width": 9}, "--width is 9, but --model is folder, which has its own"),
        ({"model": "text"}, "whose configuration cannot be read: "),
        ({"model": "empty.json"}, "whose configuration names no model_type"),
        ({"model": "mine:make", "context": 0}, "--context is 0. Expected a whole number"),
    ],
)
def test_model_that_cannot_be_found_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder/config.json").write_text('{"model_type": "gpt2", "n_positions": 64}')
    Path("text").write_text("no JSON")
    Path("empty.json").write_text("{}")
    with pytest.raises(OptionError, match=expected):
        find_model(given)


def test_options_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "tiny"\ndata = "a"\nmin-lr = 0\nstages_per_rank = 2\nresume = true\n')
    expected = {"model": "tiny", "data": ("a",), "min-lr": 0.0, "stages-per-rank": 2}
    assert {**expected, "resume": True} == read_options(str(path))
    path = tmp_path / "run.yaml"
    path.write_text("model: tiny\ndata: [a, b]\n")
    assert {"model": "tiny", "data": ("a", "b")} == read_options(str(path))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", "step = 3", r"a\.toml has the key 'step', which is not an option. Did you mean"),
        ("a.toml", "zzz = 3", "Expected the names of options"),
        ("a.toml", "steps = '3'", r"a\.toml: steps is '3'. Expected a whole number."),
        ("a.toml", "steps = true", r"a\.toml: steps is True. Expected a whole number."),
        ("a.toml", "lr = 'x'", r"a\.toml: lr is 'x'. Expected a number."),
        ("a.toml", "resume = 1", r"a\.toml: resume is 1. Expected true or false."),
        ("a.toml", "dtype = 1", r"a\.toml: dtype is 1. Expected a text."),
        ("a.toml", "data = [1]", r"a\.toml: data is \[1\]. Expected a text, or a list of texts."),
        ("a.toml", "clip = 1" + "0" * 400, r"a\.toml: clip is too large\. Expected a number"),
        ("a.toml", "a b", r"a\.toml is not valid TOML: "),
        ("a.yaml", "a: [", r"a\.yaml is not valid YAML: "),
        ("a.yaml", "[]", r"a\.yaml has no options"),
        ("missing.toml", "", r"the options in missing\.toml cannot be read: "),
    ],
)
def test_file_with_something_else_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if name != "missing.toml":
        Path(name).write_text(text)
    with pytest.raises(OptionError, match=expected):
        read_options(name)


def test_each_option_of_a_config_is_known() -> None:
    assert make_config({}, {}).options().keys() <= known_options().keys()


def test_schedule_in_a_file_knows_its_ranks_and_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(schedules.get("1F1B")(num_ranks=3, num_microbatches=4).to_csv())
    config = make_config({"schedule": str(path)}, {})
    assert (3, 4) == (config.num_ranks, config.num_microbatches)
    check_run(config)


def test_launcher_tells_how_many_ranks_there_are() -> None:
    started = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert 4 == make_config({}, started).num_ranks
    shared = make_config({"replicas": 2}, started)
    assert (2, 4) == (shared.num_ranks, shared.num_processes)
    with pytest.raises(OptionError, match=r"--ranks is 2, but 4 were started\. Leave it out"):
        make_config({"ranks": 2}, started)
    with pytest.raises(OptionError, match=r"--ranks is 1 in each of 3 pipelines, but 4 were"):
        make_config({"shards": 3}, started)
    with pytest.raises(OptionError, match=r"WORLD_SIZE is 'all' in the environment\. Expected"):
        make_config({}, {**started, "WORLD_SIZE": "all"})
    restarted = {"restarts": 2, "checkpoint": "a"}
    with pytest.raises(OptionError, match=r"--restarts is 2, but another launcher has started"):
        make_config(restarted, started)
    with pytest.raises(OptionError, match=r"--snapshot-every is 5, but nothing starts ranks again"):
        make_config({"snapshot-every": 5}, started)
    by_torchrun = {**started, "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert 5 == make_config({"snapshot-every": 5}, by_torchrun).snapshot_every
    assert 2 == make_config(restarted, {**started, "PENSTOCK_LAUNCHER": "1"}).restarts


def test_number_of_ranks_that_no_launcher_has_set_does_not_count() -> None:
    assert 4 == make_config({"ranks": 4}, {"RANK": "0", "WORLD_SIZE": "1"}).num_ranks


def test_share_is_held_out_where_something_is_to_be_evaluated() -> None:
    assert 0 == make_config({}, {}).eval_share
    assert 0.05 == make_config({"eval-every": 10}, {}).eval_share
    assert 0.5 == make_config({"eval-every": 10, "eval-share": 0.5}, {}).eval_share
    assert 0 == make_config({"eval-every": 10, "eval-data": ("a",)}, {}).eval_share


def test_recording_of_a_single_step_by_auto_is_rejected(tmp_path: Path) -> None:
    given = {"schedule": "auto", "record": str(tmp_path / "run.json")}
    check_run(make_config({**given, "steps": 2}, {}))
    with pytest.raises(OptionError, match=r"--record is given for a single step with --schedule"):
        check_run(make_config({**given, "steps": 1}, {}))


def test_resumed_run_takes_what_is_left_out_from_its_checkpoint(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"some text " * 10)
    read = Data(read_documents([str(text)]))
    options = {"seed": 3, "clip": 2.0, "min_lr": 0.001, "warmup": 1, "keep": 5, "every": 1}
    options["schedule"] = "1F1B"
    run(read, checkpoint=str(tmp_path / "run"), steps=2, num_ranks=1, **options)
    given = {"checkpoint": str(tmp_path / "run"), "resume": True}
    config = make_config(given, {})
    # With the default of keep, a resumed run would remove checkpoints that were to be kept.
    assert (5, 1, "1F1B", 1) == (config.keep, config.every, config.schedule, config.num_ranks)
    other = make_config({**given, "schedule": "ZB-V"}, {})
    assert ("ZB-V", 2) == (other.schedule, other.num_ranks)
    assert (MODEL, (str(text),), 8, 4) == (
        config.model,
        config.data,
        config.batch,
        config.num_microbatches,
    )
    assert (0.01, 3, 1, 2) == (config.lr, config.seed, config.num_ranks, config.steps)
    assert (2.0, 0.001, 1) == (config.clip, config.min_lr, config.warmup)
    with pytest.raises(OptionError, match=r"is already at step 2, and --steps is 2"):
        check_run(config)
    assert read == check_run(make_config({**given, "steps": 3}, {}))


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_to_resume_is_rejected(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path if is_there else tmp_path / "missing"
    with pytest.raises(OptionError, match=r"there is no checkpoint in .* nothing to resume"):
        make_config({"checkpoint": str(folder), "resume": True}, {})


def test_going_on_with_something_else_is_rejected(tmp_path: Path) -> None:
    run(checkpoint=str(tmp_path), steps=1, num_ranks=1)
    given = {"checkpoint": str(tmp_path)}
    with pytest.raises(OptionError, match=r"already has a checkpoint of step 1\. Give --resume"):
        check_run(make_config(given, {}))
    with pytest.raises(OptionError, match="has layers 4, but --layers is 8"):
        check_run(make_config({**given, "resume": True, "model": "small"}, {}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"checkpoint": "file/folder"}, "checkpoints cannot be written to .*Not a directory"),
        ({"record": "missing/run.json"}, "--record is .*json, which cannot be written"),
        ({"log": "."}, "--log is .*, which cannot be written. Name a file in an"),
        ({"tokenizer": "missing"}, "--tokenizer is missing, which cannot be read: No such"),
        ({"data": ("file",), "context": 4}, "--data is file, which is empty"),
        ({"data": ("abcd",), "context": 4}, "has 4 bytes. Expected at least 5, because --cont"),
        ({"export": "folder"}, "--export is folder, but .* is not a model of transformers"),
        ({"evaluate-only": True, "model": "folder"}, "there are no weights to evaluate"),
    ],
)
def test_what_cannot_be_is_rejected_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("abcd").write_text("abcd")
    Path("folder").mkdir()
    Path("folder/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(OptionError, match=expected):
        check_run(make_config(given, {}))
    check_run(make_config({"record": "run.json", "checkpoint": "new/folder"}, {}))


@pytest.mark.parametrize(
    ("package", "given", "expected"),
    [
        ("tensorboard", {"tensorboard": "x"}, "--tensorboard needs tensorboard: .*penstock.train"),
        ("wandb", {"wandb": "x"}, "--wandb needs wandb: pip install wandb"),
        ("tokenizers", {"tokenizer": "x"}, r"a tokenizer\.json needs tokenizers: .*penstock.train"),
        (
            "transformers",
            {"model": "folder"},
            "--model folder .* needs transformers: .*penstock.hf",
        ),
    ],
)
def test_package_that_is_missing_is_told_before_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    given: dict[str, str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    Path("folder").mkdir()
    Path("folder/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(OptionError, match=expected):
        check_run(make_config(given, {}))

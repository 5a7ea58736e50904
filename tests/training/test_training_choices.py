from pathlib import Path
from typing import Any

import pytest
from small_runs import MODEL, run

from penstock import schedules
from penstock.errors import OptionError
from penstock.training.choices import Choices, check_run
from penstock.training.settings import SIZES, GptConfig, TrainConfig


def test_what_is_left_out_has_its_default() -> None:
    assert TrainConfig(SIZES["small"]) == Choices().config({})


def test_sizes_can_be_changed_one_by_one() -> None:
    config = Choices(size="tiny", layers=6, heads=2).config({})
    assert GptConfig(num_layers=6, width=64, num_heads=2, context=64) == config.model


def test_size_that_is_unknown_is_rejected() -> None:
    with pytest.raises(OptionError, match=r"--size is 'Tini'. Did you mean tiny\?"):
        Choices(size="Tini").config({})


def test_schedule_in_a_file_knows_its_ranks_and_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(schedules.get("1F1B")(num_ranks=3, num_microbatches=4).to_csv())
    config = Choices(schedule=str(path)).config({})
    assert (3, 4) == (config.num_ranks, config.num_microbatches)
    check_run(config)


def test_launcher_tells_how_many_ranks_there_are() -> None:
    started = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert 3 == Choices().config(started).num_ranks
    with pytest.raises(OptionError, match=r"--ranks is 2, but 3 were started\. Leave it out"):
        Choices(ranks=2).config(started)
    with pytest.raises(OptionError, match=r"WORLD_SIZE is 'all' in the environment\. Expected"):
        Choices().config({**started, "WORLD_SIZE": "all"})


def test_number_of_ranks_that_no_launcher_has_set_does_not_count() -> None:
    assert 4 == Choices(ranks=4).config({"RANK": "0", "WORLD_SIZE": "1"}).num_ranks


def test_recording_of_a_single_step_by_auto_is_rejected(tmp_path: Path) -> None:
    record = str(tmp_path / "run.json")
    check_run(Choices(schedule="auto", steps=2, record=record).config({}))
    with pytest.raises(OptionError, match=r"--record is given for a single step with --schedule"):
        check_run(Choices(schedule="auto", steps=1, record=record).config({}))


def test_resumed_run_takes_what_is_left_out_from_its_checkpoint(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"some text " * 10)
    run(checkpoint=str(tmp_path / "run"), steps=2, num_ranks=1, seed=3, text=_read(text))
    config = Choices(checkpoint=str(tmp_path / "run"), resume=True, ranks=1).config({})
    assert (MODEL, str(text), 8, 4) == (
        config.model,
        config.text,
        config.batch,
        config.num_microbatches,
    )
    assert (0.01, 3, 1, 200) == (config.lr, config.seed, config.num_ranks, config.steps)
    assert text.read_bytes() == check_run(config).data


def _read(path: Path) -> Any:
    from penstock.training.text import read_text

    return read_text(str(path), context=8)


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_to_resume_is_rejected(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path if is_there else tmp_path / "missing"
    with pytest.raises(OptionError, match=r"there is no checkpoint in .* nothing to resume"):
        Choices(checkpoint=str(folder), resume=True).config({})


def test_beginning_again_in_the_folder_of_a_training_is_rejected(tmp_path: Path) -> None:
    run(checkpoint=str(tmp_path), steps=1, num_ranks=1)
    with pytest.raises(OptionError, match=r"already has a checkpoint of step 1\. Give --resume"):
        check_run(Choices(checkpoint=str(tmp_path)).config({}))


def test_going_on_with_another_model_is_rejected(tmp_path: Path) -> None:
    run(checkpoint=str(tmp_path), steps=1, num_ranks=1)
    with pytest.raises(OptionError, match="has layers 4, but --layers is 8"):
        check_run(Choices(checkpoint=str(tmp_path), resume=True, size="small").config({}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"checkpoint": "file/folder"}, "checkpoints cannot be written to .*Not a directory"),
        ({"record": "missing/run.json"}, "--record is .*json, which cannot be written"),
        ({"record": "."}, "--record is .*, which cannot be written. Name a file in an"),
    ],
)
def test_what_cannot_be_written_is_rejected_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(OptionError, match=expected):
        check_run(Choices(**options).config({}))
    check_run(Choices(record="run.json", checkpoint="new/folder").config({}))

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_runs import DATA, MODEL, PLAIN, batches, losses, run, saved_in
from torch import Tensor

from penstock.errors import CheckpointError, OptionError
from penstock.parallel import training_state
from penstock.training.gpt import Gpt
from penstock.training.saved import Saved, find_latest
from penstock.training.token_loss import next_token_loss

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of two steps; not to be changed."""
    folder = tmp_path_factory.mktemp("two steps")
    run(checkpoint=str(folder), steps=2)
    return folder


def test_plain_torch_loads_a_checkpoint_into_the_uncut_model(two_steps: Path) -> None:
    model = Gpt(MODEL)
    dcp.load({"model": model.state_dict()}, checkpoint_id=two_steps / "step-000002")
    tokens, target = batches().of(2)
    parts = zip(tokens.chunk(4), target.chunk(4), strict=True)
    loss = torch.stack([next_token_loss(model(x), y) for x, y in parts]).mean().item()
    assert losses(steps=3, num_ranks=1)[-1] == loss


def test_checkpoint_has_each_parameter_once_with_what_the_optimizer_keeps(two_steps: Path) -> None:
    found = dcp.FileSystemReader(two_steps / "step-000002").read_metadata().state_dict_metadata
    expected = set()
    for name in Gpt(MODEL).state_dict():
        kept = {f"optimizer.state.{name}.{kind}" for kind in ("step", "exp_avg", "exp_avg_sq")}
        expected |= {f"model.{name}", *kept}
    assert expected == found.keys()


def test_checkpoint_says_what_it_was_made_with(two_steps: Path) -> None:
    found = find_latest(two_steps)
    assert (
        Saved.of(replace(PLAIN, checkpoint=str(two_steps), steps=2), DATA.documents).after(2)
        == found
    )
    assert {"layers": 4, "width": 16, "heads": 2, "context": 8}.items() <= found.kept().items()


def test_save_that_is_interrupted_leaves_the_one_before(
    two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_be_killed(state: dict[str, Tensor], **options: Any) -> None:
        (options["checkpoint_id"] / "half").write_text("a file")
        raise KeyboardInterrupt

    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(training_state.state_dict_saver, "save", write_and_be_killed)
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=str(tmp_path), resume=True, steps=3, num_ranks=1)
    assert [".step-000003.incomplete", "step-000002"] == saved_in(tmp_path)
    assert losses(num_ranks=1)[2:] == losses(checkpoint=str(tmp_path), resume=True, num_ranks=1)
    assert ["step-000002", "step-000004"] == saved_in(tmp_path)


def test_checkpoint_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_the_disk_full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", find_the_disk_full)
    expected = "could not be written: OSError: No space left on device. What it had before"
    with pytest.raises(CheckpointError, match=expected):
        run(checkpoint=str(tmp_path), steps=1)
    assert [".step-000001.incomplete"] == saved_in(tmp_path)


def test_checkpoint_that_cannot_be_read_is_told(two_steps: Path, tmp_path: Path) -> None:
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    (tmp_path / "step-000002" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"step-000002 cannot be loaded: FileNotFoundError"):
        run(checkpoint=str(tmp_path), resume=True, num_ranks=1)


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"extra": {}}', '{"extra": {"step": 2, "options": {}}}']
)
def test_checkpoint_without_what_it_was_made_with_is_rejected(
    tmp_path: Path, text: str | None
) -> None:
    (tmp_path / "step-000002").mkdir()
    if text is not None:
        (tmp_path / "step-000002" / "training.json").write_text(text)
    with pytest.raises(OptionError, match=r"training\.json does not say .*Remove"):
        find_latest(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("lr", "x"), ("seed", None), ("microbatches", "2"), ("step", 1)]
)
def test_checkpoint_with_values_that_no_run_has_is_rejected(
    two_steps: Path, tmp_path: Path, name: str, value: object
) -> None:
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "step-000002" / "training.json"
    described = json.loads(path.read_text())
    (described["extra"] if name == "step" else described["extra"]["options"])[name] = value
    path.write_text(json.dumps(described))
    told = f"does not say what the checkpoint was made with: .*{name} is {value!r}"
    with pytest.raises(OptionError, match=told):
        find_latest(tmp_path)

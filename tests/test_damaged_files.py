"""Files that anybody may have written: each is read rightly, or refused with an error of ours.

`make fuzz` damages more than 100,000 files.
"""

import os
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from damaged_files import Kind, damage, make_kinds, write_all
from fuzzing import IS_LONG
from penstock.compat.actions import read_order
from penstock.errors import CheckpointError, OptionError, PipelineError, ScheduleError
from penstock.parallel.checkpoint_reader import CheckpointReader
from penstock.training.run_files import read_options

NAMES = [
    *("costs", "costs of an option", "level", "recording", "recorded costs", "recorded schedule"),
    *("schedule", "schedule of a training", "order of compat", "TOML", "YAML", "saved options"),
    *("description", "metadata", "values", "weights", "sharded weights", "index", "config", "log"),
]
NUM_FILES = 6000 if IS_LONG else 60
LONGEST_S = 20.0
"""No file takes longer to read, not even on a busy machine."""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return make_kinds(tmp_path_factory.mktemp("kinds"))


def test_all_kinds_of_files_are_damaged(kinds: dict[str, Kind]) -> None:
    assert NAMES == list(kinds)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_read_or_refused(name: str, kinds: dict[str, Kind], tmp_path: Path) -> None:
    write_all(kinds, tmp_path)
    kind = kinds[name]
    path = tmp_path / kind.path
    kind.read(path)  # As it is, it is read.
    seed = random.SystemRandom().randrange(2**32) if IS_LONG else 0
    num_refused = 0
    for number in range(NUM_FILES):
        content = damage(kind.content, random.Random(f"{seed} {number}"))
        path.write_bytes(content)
        began_s = time.monotonic()
        try:
            kind.read(path)
        except PipelineError:
            num_refused += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, file {number}: {content[:2000]!r}")
            raise
        assert time.monotonic() - began_s < LONGEST_S, content[:2000]
    assert num_refused > 0 or name == "log"


class Harmful:
    """Pickles as a call that writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_description_of_a_checkpoint_runs_nothing(kinds: dict[str, Kind], tmp_path: Path) -> None:
    write_all(kinds, tmp_path)
    marker = tmp_path / "was run"
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Harmful(marker)))
    with pytest.raises(CheckpointError, match=r"names \w+.mkdir, which torch does not write there"):
        CheckpointReader(tmp_path / "state").read_metadata()
    assert not marker.exists()


def test_entry_of_a_checkpoint_that_is_not_a_tensor_runs_nothing(
    kinds: dict[str, Kind], tmp_path: Path
) -> None:
    """torch would load it by pickle, where the caller expects a tensor."""
    write_all(kinds, tmp_path)
    marker, folder = tmp_path / "was run", tmp_path / "state"
    metadata: Any = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.weight")
    stored = metadata.storage_data[index]
    torch.save(Harmful(marker), folder / stored.relative_path)
    size = (folder / stored.relative_path).stat().st_size
    metadata.storage_data = {MetadataIndex("model.weight"): replace(stored, offset=0, length=size)}
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "model.weight" not in CheckpointReader(folder).read_metadata().state_dict_metadata
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        kinds["values"].read(folder / ".metadata")
    assert not marker.exists()


def change_path(metadata: Any) -> bytes:
    for stored in metadata.storage_data.values():
        stored.relative_path = "../x.distcp"
    return pickle.dumps(metadata)


def change_size(metadata: Any) -> bytes:
    metadata.state_dict_metadata["model.weight"].size = "4"
    return pickle.dumps(metadata)


def change_length(metadata: Any) -> bytes:
    for stored in metadata.storage_data.values():
        stored.length = -1
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (change_path, "'../x.distcp' is outside of the folder"),
        (change_size, "TypeError: a str is in place of a Size"),
        (change_length, "is not a part of a file"),
        (lambda metadata: pickle.dumps([]), "a list is in place of a Metadata"),
        (lambda metadata: b"\x80\x04]r\xff\xff\xff\x7f.", "2147483647 is too large for a number"),
        (lambda metadata: b"", "is not a description of a checkpoint"),
    ],
)
def test_description_of_a_checkpoint_that_cannot_be_is_refused(
    kinds: dict[str, Kind], tmp_path: Path, change: Callable[[Any], bytes], problem: str
) -> None:
    write_all(kinds, tmp_path)
    file = tmp_path / "state" / ".metadata"
    file.write_bytes(change(pickle.loads(file.read_bytes())))
    with pytest.raises(CheckpointError, match=problem):
        CheckpointReader(tmp_path / "state").read_metadata()


def test_options_in_yaml_run_nothing(tmp_path: Path) -> None:
    marker, file = tmp_path / "was_run", tmp_path / "run.yaml"
    file.write_text(f"steps: !!python/object/apply:os.mkdir [{marker}]\n")
    with pytest.raises(OptionError, match="is not valid YAML"):
        read_options(str(file))
    assert not marker.exists()


def test_order_of_torch_in_bytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_bytes(b"0F0\xff")
    with pytest.raises(ScheduleError, match=r"order.csv is not valid UTF-8 \(byte 3\)"):
        read_order(str(file))


@pytest.mark.parametrize(
    "text", ["data: &a [x, x]\nsteps: [*a, *a]", "data: " + "[" * 101], ids=["alias", "nesting"]
)
def test_yaml_that_takes_forever_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(
        OptionError, match=r"has aliases, such as \*name, or more than 100 brackets"
    ):
        read_options(str(file))

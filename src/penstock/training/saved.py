"""The folder of a training: its checkpoints, and the lock of the training that writes them.

    FOLDER/
      step-000100/            a checkpoint, in the format of torch.distributed.checkpoint
        training.json         the options it was made with
      step-000200/
      .step-000300.partial/   is being written; renamed when it is complete
      .lock                   held by the training that writes here

So a checkpoint without a dot in its name is complete; a run resumes from the last one.
"""

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.errors import OptionError
from penstock.training.documents import Documents
from penstock.training.model_sources import HuggingFaceModel
from penstock.training.settings import TrainConfig

_FILE = "training.json"
_LOCK = ".lock"
_MODEL: Final = ("model", "layers", "width", "heads", "context")
_FIXED: Final = ("batch", "accumulate", "seed", "dtype", "eval-share")
"""Options that cannot change within a training, besides those of the model."""
_KEPT: Final = (
    "data",
    "tokenizer",
    "microbatches",
    "steps",
    "lr",
    "min-lr",
    "warmup",
    "weight-decay",
    "clip",
    "skip-bad-steps",
    "autocast",
    "eval-every",
    "eval-data",
    "eval-batches",
    "every",
    "keep",
    "ranks",
    "schedule",
    "stages-per-rank",
)
"""Options that may change; a resumed run takes those that are left out from its checkpoint."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint was made with."""

    step: int
    options: Mapping[str, Any]
    digests: Mapping[str, str]
    """The hashes of the data, the tokenizer and the model's description."""

    @classmethod
    def of(cls, config: TrainConfig, documents: Documents) -> "Saved":
        """Return what a run is made with, before its first step."""
        return cls(0, config.options(), digests_of(config, documents))

    def after(self, step: int) -> "Saved":
        """Return the same at a later step."""
        return replace(self, step=step)

    def as_json(self) -> dict[str, Any]:
        """Return what `ParallelModel.save` keeps beside the weights."""
        return asdict(self)

    def kept(self) -> dict[str, Any]:
        """Return the options that a resumed run has if they are left out."""
        names = (*_MODEL, *_FIXED, *_KEPT)
        found = {name: self.options[name] for name in names if name in self.options}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def read(cls, folder: Path) -> "Saved":
        """Read what the checkpoint in a folder was made with."""
        try:
            extra = json.loads((folder / _FILE).read_text())["extra"]
            saved = cls(extra["step"], dict(extra["options"]), dict(extra["digests"]))
            if step_folder(folder.parent, saved.step) != folder:
                raise ValueError(f"step is {saved.step}")
            saved._check()
            return saved
        except (
            OSError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise OptionError(
                f"{folder / _FILE} does not say what the checkpoint was made with: {error!r}. "
                f"Remove {folder} to use the previous checkpoint."
            ) from error

    def _check(self) -> None:
        for name in ("batch", "seed", "microbatches", "steps"):
            if not isinstance(value := self.options[name], int):
                raise ValueError(f"{name} is {value!r}")
        if not isinstance(lr := self.options["lr"], int | float):
            raise ValueError(f"lr is {lr!r}")


def digests_of(config: TrainConfig, documents: Documents) -> dict[str, str]:
    """Return the hashes by which a training knows its data, tokenizer and model again."""
    model = config.model
    described = ""
    if isinstance(model, HuggingFaceModel):
        described = json.dumps(model.read_config(), sort_keys=True)
    tokenizer = config.tokenizer_file
    try:
        words = tokenizer.read_bytes() if tokenizer else b""
    except OSError as error:
        raise OptionError(
            f"--tokenizer is {tokenizer}, which cannot be read: {error.strerror}. Name a "
            "tokenizer.json."
        ) from error
    return {
        "data": documents.digest,
        "tokenizer": hashlib.sha256(words).hexdigest(),
        "model": hashlib.sha256(described.encode()).hexdigest(),
    }


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"step-{step:06d}"


def saved_steps(folder: Path) -> list[int]:
    """Return the steps that have checkpoints, in order."""
    if not folder.is_dir():
        return []
    names = [re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir()]
    return sorted(int(name[1]) for name in names if name)


def find_latest(folder: Path) -> Saved:
    """Return the settings of the last checkpoint; raise an error if there is none."""
    steps = saved_steps(folder)
    if not steps:
        raise OptionError(
            f"there is no checkpoint in {folder}, so there is nothing to resume. "
            "Set --checkpoint to the folder of a training, or leave --resume out to begin one."
        )
    return Saved.read(step_folder(folder, steps[-1]))


def last_step(config: TrainConfig, launcher: int) -> int:
    """Return the step that ranks of a launcher go on from: of a checkpoint or a snapshot; or 0."""
    saved = saved_steps(Path(config.checkpoint)) if config.resume else []
    kept = 0
    if config.snapshot_every:
        from penstock.snapshots.keeper_client import kept_step  # It loads torch.

        kept = kept_step(launcher)
    return max([*saved, kept])


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the last checkpoints, and what interrupted runs have left."""
    for step in saved_steps(folder)[:-keep]:
        shutil.rmtree(step_folder(folder, step))
    for left in folder.glob(".step-*"):
        shutil.rmtree(left)


def check_folder(config: TrainConfig) -> None:
    """Raise an error unless checkpoints can be written without mixing two trainings."""
    folder = Path(config.checkpoint)
    steps = saved_steps(folder)
    if steps and not config.resume:
        raise OptionError(
            f"{folder} already has a checkpoint of step {steps[-1]}. "
            "Give --resume to continue from it, or set --checkpoint to another folder."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OptionError(
            f"checkpoints cannot be written to {folder}: {error.strerror}. "
            "Set --checkpoint to another folder."
        ) from error


@contextmanager
def kept_from_others(folder: str) -> Iterator[None]:
    """Lock a folder for this process, if one is given.

    The system releases the lock however the process ends.
    """
    if not folder or sys.platform == "win32":  # Windows has no such lock.
        yield
        return
    import fcntl

    Path(folder).mkdir(parents=True, exist_ok=True)
    with Path(folder, _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OptionError(
                f"another training is saving to {folder}. Wait for it to end, or set "
                "--checkpoint to another folder."
            ) from error
        yield


def check_same(saved: Saved, config: TrainConfig, documents: Documents) -> None:
    """Raise an error unless this config continues the same training."""
    was, now = saved.options, config.options()
    for name in (*_MODEL, *_FIXED):
        is_path = name == "model" and isinstance(config.model, HuggingFaceModel)
        if is_path and name in was:  # It may have been moved: its description is compared below.
            continue
        if was.get(name) != now.get(name):
            raise OptionError(
                f"the training in {config.checkpoint} has {name} {was.get(name)}, but --{name} is "
                f"{now.get(name)}. Leave it out to continue with the saved value, or begin a new "
                "training in another folder."
            )
    digests = digests_of(config, documents)
    where = {
        "data": f"data ({', '.join(was.get('data') or ()) or documents.name})",
        "tokenizer": f"tokenizer ({was.get('tokenizer') or 'of the model, or bytes'})",
        "model": f"model ({was.get('model')})",
    }
    for name, described in where.items():
        if saved.digests.get(name) != digests[name]:
            raise OptionError(
                f"the training in {config.checkpoint} had another --{name} than now. Give the same "
                f"{described}, or begin a new training in another folder."
            )
    if saved.step >= config.steps and not config.evaluate_only:
        raise OptionError(
            f"the training in {config.checkpoint} is already at step {saved.step}, and --steps is "
            f"{config.steps}. Give more --steps to continue, or export it with `penstock export`."
        )

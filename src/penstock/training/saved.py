"""The folder of a training: its checkpoints, and the lock of the training that writes them.

    FOLDER/
      step-000100/        a checkpoint, in the format of torch.distributed.checkpoint
        training.json     the settings it was made with
      step-000200/
      .step-000300/       is being written; renamed when it is complete
      .lock               held by the training that writes here

So a checkpoint without a dot in its name is complete; a run resumes from the last one.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.errors import OptionError
from penstock.training.settings import GptConfig, TrainConfig
from penstock.training.text import Text

_FORMAT = "penstock checkpoint"
_FILE = "training.json"
_LOCK = ".lock"
_KEPT = 2
"""The number of checkpoints that are kept: if the last one is lost, there is another."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The settings that a checkpoint was made with."""

    step: int
    model: GptConfig
    seed: int
    batch: int
    num_microbatches: int
    lr: float
    text: str
    text_digest: str

    @classmethod
    def of(cls, config: TrainConfig, text: Text) -> "Saved":
        """Return the settings of a run before its first step."""
        path = str(Path(text.path).absolute()) if text.path else ""
        return cls(
            step=0,
            model=config.model,
            seed=config.seed,
            batch=config.batch,
            num_microbatches=config.num_microbatches,
            lr=config.lr,
            text=path,
            text_digest=text.digest,
        )

    def after(self, step: int) -> "Saved":
        """Return the same settings at a later step."""
        return replace(self, step=step)

    def write(self, folder: Path) -> None:
        """Write the settings into the folder of the checkpoint."""
        values = {"format": _FORMAT, **asdict(self)}
        (folder / _FILE).write_text(json.dumps(values, indent=2) + "\n")

    def _check(self, folder: Path) -> None:
        """Raise an error unless a run could have these values and the step is the folder's."""
        for name in ("step", "seed", "batch", "num_microbatches"):
            if not isinstance(value := getattr(self, name), int):
                raise ValueError(f"{name} is {value!r}")
        for name in ("text", "text_digest"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"{name} is {value!r}")
        if not isinstance(self.lr, int | float):
            raise ValueError(f"lr is {self.lr!r}")
        if step_folder(folder.parent, self.step) != folder:
            raise ValueError(f"step is {self.step}")

    @classmethod
    def read(cls, folder: Path) -> "Saved":
        """Read the settings from the folder of a checkpoint."""
        try:
            values = json.loads((folder / _FILE).read_text())
            if values.pop("format") != _FORMAT:
                raise ValueError("it has another format")
            saved = cls(**{**values, "model": GptConfig(**values["model"])})
            saved._check(folder)
            return saved
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(
                f"{folder / _FILE} does not say what the checkpoint was made with: {error!r}. "
                f"Remove {folder} to resume from the previous checkpoint."
            ) from error


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"step-{step:06d}"


def partial_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step while it is being written."""
    return folder / f".step-{step:06d}"


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


def complete(folder: Path, saved: Saved) -> None:
    """Give a written checkpoint its final name, and remove those no longer needed."""
    partial = partial_folder(folder, saved.step)
    saved.write(partial)
    partial.rename(step_folder(folder, saved.step))
    for step in saved_steps(folder)[:-_KEPT]:
        shutil.rmtree(step_folder(folder, step))
    for left in folder.glob(".step-*"):  # Left by interrupted runs.
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


def check_same(saved: Saved, config: TrainConfig, text: Text) -> None:
    """Raise an error unless this config continues the same training."""
    was, now = (
        {
            "layers": made.model.num_layers,
            "width": made.model.width,
            "heads": made.model.num_heads,
            "context": made.model.context,
            "batch": made.batch,
            "seed": made.seed,
        }
        for made in (saved, config)
    )
    for name in was:
        if was[name] != now[name]:
            raise OptionError(
                f"the training in {config.checkpoint} has {name} {was[name]}, but --{name} is "
                f"{now[name]}. Leave it out to continue with the saved value, or begin a new "
                "training in another folder."
            )
    if saved.text_digest != text.digest:
        raise OptionError(
            f"the training in {config.checkpoint} read a different text from {text.name} now. "
            f"Give the same --text ({saved.text or text.name}), or begin a new training in another "
            "folder."
        )
    if saved.step >= config.steps:
        raise OptionError(
            f"the training in {config.checkpoint} is already at step {saved.step}, and --steps is "
            f"{config.steps}. Give more --steps to continue."
        )

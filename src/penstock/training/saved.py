"""The folder of a training: what was saved there, by whom and up to which step.

    FOLDER/
      step-000100/        a checkpoint, in the format of torch.distributed.checkpoint
        training.json     what it was made with
      step-000200/
      .step-000300/       is being written; renamed when it is complete
      .lock               held by the training that writes here

So what has a name without a dot is complete, and the last of it is where to go on.
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
"""How many checkpoints stay: should the last one be lost, there is one more."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint was made with."""

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
        """What a run makes, before its first step."""
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
        """The same, later."""
        return replace(self, step=step)

    def write(self, folder: Path) -> None:
        """Into the folder of the checkpoint."""
        values = {"format": _FORMAT, **asdict(self)}
        (folder / _FILE).write_text(json.dumps(values, indent=2) + "\n")

    def _check(self, folder: Path) -> None:
        """Raises unless these are values that a run could have had, and the folder's own."""
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
        """From the folder of a checkpoint."""
        try:
            values = json.loads((folder / _FILE).read_text())
            if values.pop("format") != _FORMAT:
                raise ValueError("it is of another format")
            saved = cls(**{**values, "model": GptConfig(**values["model"])})
            saved._check(folder)
            return saved
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(
                f"{folder / _FILE} does not say what the checkpoint was made with: {error!r}. "
                f"Remove {folder} to go on with the one before."
            ) from error


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:06d}"


def partial_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is while it is being written."""
    return folder / f".step-{step:06d}"


def saved_steps(folder: Path) -> list[int]:
    """The steps of which there are checkpoints, in order."""
    if not folder.is_dir():
        return []
    names = [re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir()]
    return sorted(int(name[1]) for name in names if name)


def find_latest(folder: Path) -> Saved:
    """What the last checkpoint was made with; raises if there is none."""
    steps = saved_steps(folder)
    if not steps:
        raise OptionError(
            f"there is no checkpoint in {folder}, so there is nothing to resume. "
            "Let --checkpoint name the folder of a training, or leave --resume out to begin one."
        )
    return Saved.read(step_folder(folder, steps[-1]))


def complete(folder: Path, saved: Saved) -> None:
    """Give a checkpoint that was written its name, and remove those that are not needed more."""
    partial = partial_folder(folder, saved.step)
    saved.write(partial)
    partial.rename(step_folder(folder, saved.step))
    for step in saved_steps(folder)[:-_KEPT]:
        shutil.rmtree(step_folder(folder, step))
    for left in folder.glob(".step-*"):  # By runs that were interrupted.
        shutil.rmtree(left)


def check_folder(config: TrainConfig) -> None:
    """Raises unless checkpoints can be written there, without mixing two trainings."""
    folder = Path(config.checkpoint)
    steps = saved_steps(folder)
    if steps and not config.resume:
        raise OptionError(
            f"{folder} has a checkpoint of step {steps[-1]} already. "
            "Give --resume to go on with it, or let --checkpoint name another folder."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OptionError(
            f"checkpoints cannot be written to {folder}: {error.strerror}. "
            "Let --checkpoint name another folder."
        ) from error


@contextmanager
def kept_from_others(folder: str) -> Iterator[None]:
    """Keeps a folder for this process, if it is given; the system lets go of it, come what may."""
    if not folder or sys.platform == "win32":  # There is no such lock.
        yield
        return
    import fcntl

    Path(folder).mkdir(parents=True, exist_ok=True)
    with Path(folder, _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OptionError(
                f"another training is saving to {folder} at this moment. Wait for its end, or let "
                "--checkpoint name another folder."
            ) from error
        yield


def check_same(saved: Saved, config: TrainConfig, text: Text) -> None:
    """Raises unless going on with this config is going on with the same training."""
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
                f"{now[name]}. Leave it out to go on with what was saved, or begin a new training "
                "in another folder."
            )
    if saved.text_digest != text.digest:
        raise OptionError(
            f"the training in {config.checkpoint} read another text than {text.name} is now. "
            f"Give the same --text ({saved.text or text.name}), or begin a new training in another "
            "folder."
        )
    if saved.step >= config.steps:
        raise OptionError(
            f"the training in {config.checkpoint} is at step {saved.step} already, and --steps is "
            f"{config.steps}. Give more --steps to go on."
        )

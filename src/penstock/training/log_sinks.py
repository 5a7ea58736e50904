"""Where the figures of a run go besides the screen: JSON lines, TensorBoard, wandb."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import OptionError
from penstock.extras import needed_by
from penstock.training.settings import TrainConfig

if TYPE_CHECKING:
    from penstock.training.held_out import Evaluated
    from penstock.training.trainer import StepDone


class AbstractSink(ABC):
    """A log of figures by their names."""

    @abstractmethod
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step."""

    @abstractmethod
    def close(self) -> None:
        """End the log."""


class JsonLinesFile(AbstractSink):
    """A file with one object for each step and each evaluation; a resumed run appends to it."""

    def __init__(self, path: str, *, is_resumed: bool) -> None:
        self._file = Path(path).open("a" if is_resumed else "w")  # noqa: SIM115  # Until close().

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard(AbstractSink):
    """A folder of TensorBoard's."""

    def __init__(self, folder: str) -> None:
        with needed_by("--tensorboard", ["tensorboard"], extra="train", error=OptionError):
            from torch.utils.tensorboard import SummaryWriter
        self._writer: Any = SummaryWriter(folder)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb(AbstractSink):
    """A run of Weights & Biases."""

    def __init__(self, project: str, options: Mapping[str, Any]) -> None:
        with needed_by("--wandb", ["wandb"], extra="train,wandb", error=OptionError):
            wandb = import_module("wandb")
        self._run: Any = wandb.init(project=project, config=dict(options))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class Logs:
    """All the logs of a run; rank 0 writes them."""

    def __init__(self, config: TrainConfig) -> None:
        self._sinks: list[AbstractSink] = []
        if config.log:
            self._sinks.append(JsonLinesFile(config.log, is_resumed=config.resume))
        if config.tensorboard:
            self._sinks.append(TensorBoard(config.tensorboard))
        if config.wandb:
            self._sinks.append(Wandb(config.wandb, config.options()))

    def step(self, done: "StepDone") -> None:
        """Log a finished step."""
        self._write(done.step, figures_of(done))

    def evaluated(self, found: "Evaluated") -> None:
        """Log an evaluation."""
        self._write(found.step, {"eval_loss": found.loss, "perplexity": found.perplexity})

    def close(self) -> None:
        """End all logs."""
        for sink in self._sinks:
            sink.close()

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, figures)


def figures_of(done: "StepDone") -> dict[str, float]:
    """Return the figures of a step by the names that logs have them under."""
    figures = {
        "loss": done.loss,
        "lr": done.lr,
        "duration_s": done.duration_s,
        "tokens_per_s": done.tokens_per_s,
    }
    if done.grad_norm is not None:
        figures["grad_norm"] = done.grad_norm
    if done.seen is not None:
        figures["memory_bytes"] = done.seen.memory_bytes
        if done.seen.bubble is not None:
            figures["bubble"] = done.seen.bubble
    return figures

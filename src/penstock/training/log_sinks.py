"""Where the figures of a run go besides the screen: JSON lines, TensorBoard, wandb.

That their packages are installed was checked before the ranks started.
"""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.training.saved import last_step
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
    """A file with one object for each step and each evaluation.

    A resumed run keeps the lines up to the step from which it goes on.
    """

    def __init__(self, path: str, *, resumed_step: int) -> None:
        kept = []
        if resumed_step and Path(path).exists():
            lines = Path(path).read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= resumed_step]
        Path(path).write_bytes(b"".join(kept))
        self._file = Path(path).open("a")  # noqa: SIM115  # Open until close().

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard(AbstractSink):
    """A folder of TensorBoard's."""

    def __init__(self, folder: str, *, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            folder, purge_step=resumed_step + 1 if resumed_step else None
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb(AbstractSink):
    """A run of Weights & Biases."""

    def __init__(self, project: str, options: Mapping[str, Any]) -> None:
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
        step = last_step(config, os.getppid())
        if config.log:
            self._sinks.append(JsonLinesFile(config.log, resumed_step=step))
        if config.tensorboard:
            self._sinks.append(TensorBoard(config.tensorboard, resumed_step=step))
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


def _step_of(line: bytes) -> float:
    """Return the step of a line in a log; one that was cut off counts as later than all."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if type(step) is int else math.inf


def figures_of(done: "StepDone") -> dict[str, float]:
    """Return the figures of a step by the names that logs have them under."""
    figures = {
        "lr": done.lr,
        "duration_s": done.duration_s,
        "tokens_per_s": done.tokens_per_s,
    }
    if math.isfinite(done.loss):  # JSON has no other numbers.
        figures = {"loss": done.loss, **figures}
    if done.skipped:
        figures["skipped"] = 1
    if done.grad_norm is not None:
        figures["grad_norm"] = done.grad_norm
    if done.seen is not None:
        figures["memory_bytes"] = done.seen.memory_bytes
        if done.seen.bubble is not None:
            figures["bubble"] = done.seen.bubble
    return figures

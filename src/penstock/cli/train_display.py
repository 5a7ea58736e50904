"""The display of a training: a bar on a terminal, lines in a file, or JSON."""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.screen import console
from penstock.schedules.given_shape import is_auto
from penstock.solver.registered_schedules import registered
from penstock.training.log_sinks import figures_of
from penstock.training.orders import choose_orders
from penstock.training.saved import last_step, step_folder
from penstock.training.settings import TrainConfig

if TYPE_CHECKING:
    from penstock.training.forecast import Forecast
    from penstock.training.held_out import Evaluated
    from penstock.training.trainer import StepDone, Trained

_LINES = 20
"""The approximate number of lines printed for a run of any length."""


class AbstractDisplay(ABC):
    """The display of a training; rank 0 calls it."""

    @abstractmethod
    def begin(self) -> None:
        """Start the display before the first step."""

    @abstractmethod
    def show_forecast(self, found: "Forecast") -> None:
        """Show what the run is expected to need, before its first step."""

    @abstractmethod
    def show(self, done: "StepDone") -> None:
        """Show a step that has finished."""

    @abstractmethod
    def show_evaluated(self, found: "Evaluated") -> None:
        """Show an evaluation."""

    @abstractmethod
    def end(self, trained: "Trained | None") -> None:
        """End the display after the last step; `trained` is None if the training failed."""


def make_display(config: TrainConfig, *, is_json: bool, is_first: bool) -> AbstractDisplay:
    """Return the display that suits the output; only the first rank shows anything."""
    if not is_first:
        return Silence()
    if is_json:
        return JsonLines()
    return Bar(config) if sys.stdout.isatty() else Lines(config)


class Silence(AbstractDisplay):
    """The display of the other ranks, which shows nothing."""

    def begin(self) -> None: ...

    def show_forecast(self, found: "Forecast") -> None: ...

    def show(self, done: "StepDone") -> None: ...

    def show_evaluated(self, found: "Evaluated") -> None: ...

    def end(self, trained: "Trained | None") -> None: ...


class JsonLines(AbstractDisplay):
    """One object for each step."""

    def begin(self) -> None: ...

    def show_forecast(self, found: "Forecast") -> None: ...

    def show(self, done: "StepDone") -> None:
        print(json.dumps({"step": done.step, **figures_of(done)}), flush=True)

    def show_evaluated(self, found: "Evaluated") -> None:
        figures = {"eval_loss": found.loss, "perplexity": found.perplexity}
        print(json.dumps({"step": found.step, **figures}), flush=True)

    def end(self, trained: "Trained | None") -> None: ...


class Lines(AbstractDisplay):
    """A line for the first step, the last one, and some of those between."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._every = max(config.steps // _LINES, 1)
        self._is_first = True
        self._facts = _Facts(config)

    def begin(self) -> None:
        print(describe(self._config), flush=True)

    def show_forecast(self, found: "Forecast") -> None:
        print(found, flush=True)

    def show(self, done: "StepDone") -> None:
        is_last = done.step == self._config.steps
        if self._is_first or is_last or done.skipped or done.step % self._every == 0:
            width = len(str(self._config.steps))
            left = "" if is_last else self._facts.time_left(done.step)
            print(f"step {done.step:{width}d}  {self._facts.of(done)}{left}", flush=True)
        if done.skipped:
            print(f"skipped: {done.skipped}", flush=True)
        self._is_first = False

    def show_evaluated(self, found: "Evaluated") -> None:
        print(describe_evaluated(found), flush=True)

    def end(self, trained: "Trained | None") -> None:
        if trained is not None and (summary := summarise(self._config, trained)):
            print(summary, flush=True)


class Bar(AbstractDisplay):
    """A bar with the loss, the speed and the remaining time."""

    def __init__(self, config: TrainConfig) -> None:
        from rich import progress

        self._config = config
        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[facts]}"),
            progress.TimeRemainingColumn(),
            console=console(),
        )
        self._task = self._bar.add_task("", total=config.steps, facts="starting")
        self._facts = _Facts(config)

    def begin(self) -> None:
        print(describe(self._config), flush=True)
        self._bar.start()

    def show_forecast(self, found: "Forecast") -> None:
        self._bar.console.print(str(found))

    def show(self, done: "StepDone") -> None:
        self._bar.update(self._task, completed=done.step, facts=self._facts.of(done))
        if done.skipped:
            self._bar.console.print(f"skipped: {done.skipped}", markup=False)

    def show_evaluated(self, found: "Evaluated") -> None:
        self._bar.console.print(describe_evaluated(found))

    def end(self, trained: "Trained | None") -> None:
        self._bar.stop()
        if trained is not None and (summary := summarise(self._config, trained)):
            print(summary, flush=True)


class _Facts:
    """The facts of a step in one line; those that are measured now and then stay until the next."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._seen = ""
        self._began: tuple[int, float] | None = None

    def of(self, done: "StepDone") -> str:
        if done.seen is not None:
            bubble = "" if done.seen.bubble is None else f"  bubble {done.seen.bubble:.1%}"
            self._seen = f"{bubble}  {done.seen.memory_bytes / 2**20:,.0f} MiB"
        if self._began is None:
            self._began = done.step, time.monotonic()
        return f"loss {done.loss:.4f}  {done.tokens_per_s:,.0f} tokens/s{self._seen}"

    def time_left(self, step: int) -> str:
        if self._began is None or step == self._began[0]:
            return ""
        since, began_s = self._began
        left_s = (time.monotonic() - began_s) / (step - since) * (self._config.steps - step)
        minutes, seconds = divmod(round(left_s), 60)
        return f"  {minutes}:{seconds:02d} left"


def describe_evaluated(found: "Evaluated") -> str:
    """Return a line for an evaluation."""
    return f"step {found.step}  held out: loss {found.loss:.4f}, perplexity {found.perplexity:.2f}"


def describe(config: TrainConfig) -> str:
    """Return a line that describes the run before it begins."""
    num_stages = choose_orders(config).placement.num_stages
    went_on = ""
    if last := last_step(config, os.getppid()):
        went_on = f", from step {last}"
    times = f" x {config.num_pipelines} pipelines" if config.num_pipelines > 1 else ""
    what = "evaluating" if config.evaluate_only else "training"
    return (
        f"{what} {config.model} in {_counted(num_stages, 'stage')} on "
        f"{_counted(config.num_ranks, 'rank')}{times} by {config.schedule}{went_on}"
    )


def summarise(config: TrainConfig, trained: "Trained") -> str:
    """Return lines that summarise the finished run."""
    lines = []
    if trained.steps:
        lines += [
            f"loss {trained.steps[-1].loss:.4f} in step {trained.steps[-1].step}, "
            f"{trained.tokens_per_s:,.0f} tokens/s (median)",
            _describe_schedule(config, trained),
        ]
        if num_skipped := sum(bool(done.skipped) for done in trained.steps):
            were = "was" if num_skipped == 1 else "were"
            lines.append(f"skipped {_counted(num_skipped, 'step')} that {were} not finite")
        if config.checkpoint:
            lines.append(f"checkpoint {step_folder(Path(config.checkpoint), config.steps)}")
    if config.record:
        lines.append(f'recording {config.record}: view it with "penstock show {config.record}"')
    if config.export:
        lines.append(f"exported to {config.export}, for transformers")
    if trained.sample:
        lines.append(f"sample: {trained.sample}")
    return "\n".join(lines)


def _describe_schedule(config: TrainConfig, trained: "Trained") -> str:
    bubbles = [done.seen.bubble for done in trained.steps if done.seen is not None]
    measured = f", bubble {bubbles[-1]:.1%} (measured)" if bubbles and bubbles[-1] else ""
    if not is_auto(config.schedule):
        return f"schedule {config.schedule}{measured}"
    known = registered(trained.schedule.placement, trained.schedule.num_microbatches)
    found = next(
        (name for name, same in known if same == trained.schedule), "a new one, without a name"
    )
    return f"schedule auto, found in the first steps: {found}{measured}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"

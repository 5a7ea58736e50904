"""The display of a training: a bar on a terminal, lines in a file, or JSON."""

import json
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.screen import console
from penstock.sim import simulate
from penstock.solver.registered_schedules import registered
from penstock.training.orders import AUTO, choose_orders
from penstock.training.saved import step_folder
from penstock.training.settings import TrainConfig

if TYPE_CHECKING:
    from penstock.training.trainer import StepDone, Trained

_LINES = 20
"""The approximate number of lines printed for a run of any length."""


class AbstractDisplay(ABC):
    """The display of a training; rank 0 calls it."""

    @abstractmethod
    def begin(self) -> None:
        """Start the display before the first step."""

    @abstractmethod
    def show(self, done: "StepDone") -> None:
        """Show a step that has finished."""

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

    def show(self, done: "StepDone") -> None: ...

    def end(self, trained: "Trained | None") -> None: ...


class JsonLines(AbstractDisplay):
    """One object for each step."""

    def begin(self) -> None: ...

    def show(self, done: "StepDone") -> None:
        print(json.dumps(asdict(done)), flush=True)

    def end(self, trained: "Trained | None") -> None: ...


class Lines(AbstractDisplay):
    """A line for the first step, the last one, and some of those between."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._every = max(config.steps // _LINES, 1)
        self._is_first = True

    def begin(self) -> None:
        print(describe(self._config), flush=True)

    def show(self, done: "StepDone") -> None:
        is_last = done.step == self._config.steps
        if self._is_first or is_last or done.step % self._every == 0:
            width = len(str(self._config.steps))
            print(
                f"step {done.step:{width}d}  loss {done.loss:.4f}  "
                f"{done.tokens_per_s:,.0f} tokens/s",
                flush=True,
            )
        self._is_first = False

    def end(self, trained: "Trained | None") -> None:
        if trained is not None:
            print(summarise(self._config, trained), flush=True)


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

    def begin(self) -> None:
        print(describe(self._config), flush=True)
        self._bar.start()

    def show(self, done: "StepDone") -> None:
        facts = f"loss {done.loss:.4f}  {done.tokens_per_s:,.0f} tokens/s"
        self._bar.update(self._task, completed=done.step, facts=facts)

    def end(self, trained: "Trained | None") -> None:
        self._bar.stop()
        if trained is not None:
            print(summarise(self._config, trained), flush=True)


def describe(config: TrainConfig) -> str:
    """Return a line that describes the run before it begins."""
    model, num_stages = config.model, choose_orders(config).placement.num_stages
    went_on = f", from the last checkpoint in {config.checkpoint}" if config.resume else ""
    return (
        f"training {model.num_parameters:,} parameters ({model.num_layers} layers) in "
        f"{num_stages} stages on {config.num_ranks} ranks by {config.schedule}{went_on}"
    )


def summarise(config: TrainConfig, trained: "Trained") -> str:
    """Return lines that summarise the finished run."""
    lines = [
        f"loss {trained.steps[-1].loss:.4f} in step {trained.steps[-1].step}, "
        f"{trained.tokens_per_s:,.0f} tokens/s (median)",
        _describe_schedule(config, trained),
    ]
    if config.checkpoint:
        lines.append(f"checkpoint {step_folder(Path(config.checkpoint), config.steps)}")
    if config.record:
        lines.append(f'recording {config.record}: view it with "penstock show {config.record}"')
    return "\n".join(lines)


def _describe_schedule(config: TrainConfig, trained: "Trained") -> str:
    if config.schedule.lower() == AUTO:  # It was made for costs that are not equal.
        known = registered(trained.schedule.placement, trained.schedule.num_microbatches)
        found = next(
            (name for name, same in known if same == trained.schedule), "a new one, without a name"
        )
        return f"schedule auto, found in the first steps: {found}"
    bubble = simulate(trained.schedule).bubble_by_makespan
    return (
        f"schedule {config.schedule}, expected bubble {bubble:.1%} if F, I and W of all stages "
        "cost the same"
    )

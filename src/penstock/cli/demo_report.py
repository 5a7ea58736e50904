"""The progress of the demonstration, and its report at the end."""

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.screen import print_table
from penstock.draw import Panel, save
from penstock.draw.curves import loss_curves
from penstock.draw.in_terminal import print_panels
from penstock.training.settings import TrainConfig
from penstock.training.side_by_side import Contender
from penstock.training.trainer import StepDone

if TYPE_CHECKING:
    from rich.console import Console

_LEVELS = "▁▂▃▄▅▆▇█"
_MOST_COLUMNS = 60


class Progress(AbstractContextManager["Progress"]):
    """The progress of the training: a bar on a terminal, otherwise some lines."""

    def __init__(self, configs: Sequence[TrainConfig], console: "Console", is_shown: bool) -> None:
        from rich import progress

        self._names = [config.schedule for config in configs]
        self._steps = configs[0].steps
        self._is_shown, self._has_bar = is_shown, is_shown and sys.stdout.isatty()
        self._facts: dict[str, str] = {}
        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.fields[facts]}"),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not self._has_bar,
        )
        self._task = self._bar.add_task("", total=self._steps, facts="starting")
        if is_shown:
            print(
                f"Training {configs[0].model} on {configs[0].num_ranks} processes, by "
                f"{' and by '.join(self._names)} in turn.",
                flush=True,
            )

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, schedule: str, done: StepDone) -> None:
        """Show that one of the schedules has finished a step."""
        self._facts[schedule] = f"{schedule}: {done.tokens_per_s:,.0f} tokens/s"
        facts = f"loss {done.loss:.3f}  {'  '.join(self._facts[n] for n in sorted(self._facts))}"
        self._bar.update(self._task, completed=done.step, facts=facts)
        is_last_of_round = len(self._facts) == len(self._names)
        if not self._is_shown or self._has_bar or not is_last_of_round:
            return
        if done.step in (1, self._steps) or done.step % max(self._steps // 6, 1) == 0:
            print(f"step {done.step:3d}  {facts}", flush=True)
        self._facts.clear()


def report(contenders: Sequence[Contender], folder: Path, console: "Console") -> None:
    """Print losses, timelines and bubbles, and write files with more of each."""
    panels = [
        Panel.of_recording(f"{contender.schedule}, measured", contender.recording)
        for contender in contenders
    ]
    console.print()
    print_panels(panels, console, memory=False)
    console.print()
    _print_losses(contenders)
    print()
    _print_bubbles(contenders)
    save(panels, folder / "timeline.html")
    save(panels, folder / "timeline.png")
    save(panels, folder / "trace.json")
    curves = {contender.schedule: contender.losses for contender in contenders}
    loss_curves(curves, folder / "loss.png")
    figures = [_figures(contender) for contender in contenders]
    (folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(
        f"\nIn {folder}:\n"
        "  timeline.html  the timelines, to zoom and hover; timeline.png is a picture of them\n"
        "  loss.png       the losses\n"
        "  trace.json     the timelines for ui.perfetto.dev\n"
        "  figures.json   the figures above, and every loss\n"
        '  run.json       the recorded steps, for "penstock show"; baseline.json those of '
        f"{contenders[0].schedule}"
    )


def _print_losses(contenders: Sequence[Contender]) -> None:
    width = max(len(contender.schedule) for contender in contenders)
    for contender in contenders:
        losses = contender.losses
        curve = sparkline(losses, _MOST_COLUMNS)
        print(f"loss, {contender.schedule:{width}}  {losses[0]:.3f} {curve} {losses[-1]:.3f}")
    first, second = (contender.losses for contender in contenders)
    apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
    if apart == 0:
        print(f"The losses of all {len(first)} steps are equal to the last bit.")
    else:
        print(f"The two losses differ by at most {apart:.1g} in any step.")


def sparkline(values: Sequence[float], columns: int) -> str:
    """Return values as a row of bars, each the mean of several neighbouring values."""
    count = min(columns, len(values))
    edges = [round(number * len(values) / count) for number in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    lowest, highest = min(means), max(means)
    steps = (len(_LEVELS) - 1) / ((highest - lowest) or 1.0)
    return "".join(_LEVELS[round((mean - lowest) * steps)] for mean in means)


def _figures(contender: Contender) -> dict[str, Any]:
    return {
        "schedule": contender.schedule,
        "step_s": contender.step_s,
        "tokens_per_s": contender.tokens_per_s,
        "measured_bubble": contender.recording.typical().bubble_by_makespan,
        "simulated_bubble": contender.recording.simulated().bubble_by_makespan,
        "losses": contender.losses,
    }


def _print_bubbles(contenders: Sequence[Contender]) -> None:
    figures = [_figures(contender) for contender in contenders]
    rows = [
        (
            found["schedule"],
            f"{found['step_s'] * 1e3:.0f} ms",
            f"{found['tokens_per_s']:,.0f}",
            f"{found['measured_bubble']:.1%}",
            f"{found['simulated_bubble']:.1%}",
            f"{figures[0]['step_s'] / found['step_s']:.2f}",
        )
        for found in figures
    ]
    header = ("schedule", "step", "tokens/s", "bubble", "simulated", "speed")
    print_table(header, rows, words=("schedule",))
    if figures[1]["step_s"] > figures[0]["step_s"]:
        print(
            f"{figures[1]['schedule']} was slower here. Each process needs a core of its own. If "
            "other programs use it, waiting for the core counts as work: the bubble looks smaller."
        )

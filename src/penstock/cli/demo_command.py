"""`penstock demo`: show what Penstock does, in a minute or two on this machine."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.ranks import be_rank, start_ranks
from penstock.cli.screen import console
from penstock.errors import OptionError
from penstock.extras import needed_by
from penstock.schedules import get
from penstock.schedules.given_shape import is_auto
from penstock.training.choices import Data, check_run
from penstock.training.gpt_sizes import GptConfig
from penstock.training.launching import Attempt, is_worker
from penstock.training.orders import is_file
from penstock.training.settings import TrainConfig

BASELINE = "1F1B"
_MODEL = GptConfig(num_layers=8, width=192, num_heads=4, context=64)


def demo(
    steps: Annotated[int, typer.Option("--steps", help="Number of steps of each training.")] = 100,
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME|FILE", help="Schedule to compare with 1F1B.")
    ] = "ZB-V",
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="Processes to start.")] = 2,
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-m", help="Number of microbatches.")
    ] = 4,
    folder: Annotated[
        str, typer.Option("--folder", "-o", metavar="FOLDER", help="Where to put the files.")
    ] = "penstock-demo",
) -> None:
    """Train a small GPT by a zero-bubble schedule and by 1F1B, side by side, and compare.

    It learns the source code of Python's own library on two processes of this machine. Both
    trainings start from the same weights and see the same batches, so they learn the same. They
    differ only in how long the processes wait for each other. This takes about a minute.

    \b
    penstock demo
    penstock demo --steps 20
    penstock demo --schedule ZB-H1 --folder /tmp/demo
    """
    configs = _configs(steps, schedule, ranks, microbatches, Path(folder))
    read = [check_run(config) for config in configs]
    if is_worker(os.environ):
        raise typer.Exit(be_rank(lambda: _work(configs, read[0], Path(folder))))
    with needed_by("the demo", ["matplotlib"], extra="cli,draw", error=OptionError):
        import matplotlib  # noqa: F401  # Checked now: the pictures are drawn at the end.
    given = {
        "--steps": steps,
        "--schedule": schedule,
        "--ranks": ranks,
        "--microbatches": microbatches,
        "--folder": folder,
    }
    arguments = [f"{name}={value}" for name, value in given.items()]
    raise typer.Exit(start_ranks(Attempt(["demo", *arguments], ranks)))


def _configs(
    steps: int, schedule: str, ranks: int, microbatches: int, folder: Path
) -> list[TrainConfig]:
    """Return configs of the same training by two schedules."""
    if is_auto(schedule) or (not is_file(schedule) and get(schedule).name == BASELINE):
        raise OptionError(
            f"--schedule is {schedule}, but {BASELINE} must be compared with another, fixed "
            'schedule. Give its name, such as ZB-V; "penstock list" lists them all.'
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"--folder is {folder}, which cannot be made: {error.strerror}. Give another."
        ) from error
    plain = TrainConfig(
        _MODEL,
        num_ranks=ranks,
        num_microbatches=microbatches,
        batch=4 * microbatches,
        steps=steps,
        lr=3e-4,
    )
    return [
        replace(plain, schedule=BASELINE, record=str(folder / "baseline.json")),
        replace(plain, schedule=schedule, record=str(folder / "run.json")),
    ]


def _work(configs: list[TrainConfig], data: Data, folder: Path) -> None:
    """Run as one of the ranks; rank 0 shows the progress and the report."""
    from penstock.cli.demo_report import Progress, report
    from penstock.training.side_by_side import train_side_by_side
    from penstock.training.worker import joined

    is_first = os.environ["RANK"] == "0"
    with Progress(configs, console(), is_shown=is_first) as progress, joined() as device:
        contenders = train_side_by_side(configs, data, device=device, on_step=progress.show)
    if is_first:
        report(contenders, folder, console())

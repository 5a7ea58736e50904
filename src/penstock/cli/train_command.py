"""`penstock train`: train a language model on the processes of one machine or several."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.ranks import be_rank, start_ranks
from penstock.cli.train_display import make_display
from penstock.training.choices import Choices, check_run
from penstock.training.launching import is_worker
from penstock.training.saved import saved_steps
from penstock.training.settings import SIZES, TrainConfig
from penstock.training.text import Text


def train(
    size: Annotated[
        str | None,
        typer.Option(
            "--size", metavar="|".join(SIZES), help="Size of the model; small if not given."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of blocks of the model.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Width of the model: numbers per token.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Number of attention heads.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Number of bytes that it reads at a time.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Text to learn; Python's own library if not given."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-p", help="Processes to start; 2 if not given.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME|auto|FILE", help="ZB-V if not given; FILE ends in .csv."),
    ] = None,
    stages_per_rank: Annotated[
        int | None,
        typer.Option("--stages-per-rank", "-v", help="The schedule's own number if not given."),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option("--microbatches", "-m", help="Number of microbatches; 8 if not given."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences in a step; 16 if not given.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of the last step; 200 if not given.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of AdamW; 0.001 if not given.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights and batches; 0 if not given.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(metavar="FOLDER", help="Folder for checkpoints.")] = "",
    every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; 100 if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in FOLDER.")
    ] = False,
    record: Annotated[
        str, typer.Option(metavar="FILE", help="Record the steps, for penstock show.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each step.")
    ] = False,
) -> None:
    """Train a small language model that reads bytes, in pipeline-parallel stages.

    A resumed training may use other ranks and another schedule than before. What the checkpoint
    holds (model, text, batch, seed, microbatches, learning rate) is kept if it is left out. On
    several machines, start it on each with torchrun.

    \b
    penstock train
    penstock train --size tiny --steps 300 --checkpoint runs/first
    penstock train --steps 600 --checkpoint runs/first --resume --ranks 4 --schedule 1F1B
    penstock train --text book.txt --schedule auto --record run.json
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m penstock train --size large --checkpoint /shared/run
    """
    choices = Choices(
        size=size,
        layers=layers,
        width=width,
        heads=heads,
        context=context,
        text=text,
        ranks=ranks,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        microbatches=microbatches,
        batch=batch,
        steps=steps,
        lr=lr,
        seed=seed,
        checkpoint=checkpoint,
        every=every,
        resume=resume,
        record=record,
    )
    raise typer.Exit(_run(choices, as_json))


def _run(choices: Choices, as_json: bool) -> int:
    """Run as one of the ranks, or start them; return the exit code."""
    config = choices.config(os.environ)
    read = check_run(config)
    if is_worker(os.environ):
        return be_rank(lambda: _work(config, read, as_json))
    arguments = [*as_arguments(config), *(["--json"] if as_json else [])]
    try:
        return start_ranks(arguments, config.num_ranks)
    except KeyboardInterrupt:
        if config.checkpoint and (saved := saved_steps(Path(config.checkpoint))):
            print(f"--resume continues from step {saved[-1]}", file=sys.stderr)
        raise


def as_arguments(config: TrainConfig) -> list[str]:
    """Return the command line of a run."""
    model = config.model
    values = {
        "--layers": model.num_layers,
        "--width": model.width,
        "--heads": model.num_heads,
        "--context": model.context,
        "--text": config.text,
        "--ranks": config.num_ranks,
        "--schedule": config.schedule,
        "--stages-per-rank": config.stages_per_rank,
        "--microbatches": config.num_microbatches,
        "--batch": config.batch,
        "--steps": config.steps,
        "--lr": config.lr,
        "--seed": config.seed,
        "--checkpoint": config.checkpoint,
        "--every": config.every,
        "--record": config.record,
    }
    given = [f"{name}={value}" for name, value in values.items() if value is not None]
    return ["train", *given, *(["--resume"] if config.resume else [])]


def _work(config: TrainConfig, text: Text, is_json: bool) -> None:
    """Run as one of the ranks."""
    display = make_display(config, is_json=is_json, is_first=os.environ["RANK"] == "0")
    display.begin()
    trained = None
    try:
        from penstock.training.worker import work

        trained = work(config, text, display.show)
    finally:
        display.end(trained)

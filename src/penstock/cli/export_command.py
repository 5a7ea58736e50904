"""`penstock export`: write a trained model as a folder of Hugging Face."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import train_options as options
from penstock.cli.train_command import run_training
from penstock.training.saved import find_latest


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder of a training's checkpoints.")
    ],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder to write.")],
    ranks: options.Ranks = None,
) -> None:
    """Write the last checkpoint of a training for from_pretrained() of transformers.

    The folder gets safetensors files, the configuration and the tokenizer. The model must have
    come from a folder of Hugging Face. More ranks need less memory each.

    \b
    penstock export runs/book exported
    penstock export runs/book exported --ranks 4
    """
    given = {
        "checkpoint": checkpoint,
        "resume": True,
        "export": folder,
        "steps": find_latest(Path(checkpoint)).step,  # So none is left to train.
        "warmup": 0,
        "data": (),
        "eval-data": (),
        "schedule": "1F1B",
        "force": True,  # What training would hold is not needed.
        "ranks": 1 if ranks is None else ranks,
    }
    raise typer.Exit(run_training(given, as_json=False))

"""`penstock export`: write a trained model as a folder of Hugging Face."""

import os
from typing import Annotated

import typer

from penstock.cli.ranks import be_rank, start_ranks
from penstock.training.export_choice import Export, choose_export
from penstock.training.launching import Attempt, is_worker


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder of a training's checkpoints.")
    ],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder to write.")],
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-p", help="Ranks to export on; 1 if not given.")
    ] = None,
) -> None:
    """Write the last checkpoint of a training for from_pretrained() of transformers.

    The folder gets safetensors files, the configuration and the tokenizer. The model must have
    come from a folder of Hugging Face. More ranks need less memory each.

    \b
    penstock export runs/book exported
    penstock export runs/book exported --ranks 4
    """
    chosen = choose_export(checkpoint, folder, ranks, os.environ)
    if is_worker(os.environ):
        raise typer.Exit(be_rank(lambda: _work(chosen)))
    num_ranks = chosen.config.num_ranks
    arguments = ["export", checkpoint, folder, f"--ranks={num_ranks}"]
    raise typer.Exit(start_ranks(Attempt(arguments, num_ranks)))


def _work(chosen: Export) -> None:
    """Run as one of the ranks; the first one says what is done."""
    is_first = os.environ["RANK"] == "0"
    if is_first:
        print(chosen, flush=True)
    from penstock.training.exporting import export_checkpoint
    from penstock.training.worker import joined

    with joined() as device:
        export_checkpoint(chosen, device=device)
    if is_first:
        print(f"exported to {chosen.config.export}, for transformers", flush=True)

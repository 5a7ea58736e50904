"""The options of `penstock plan` that no other command has."""

from typing import Annotated, TypeAlias

import typer

ModelFunction: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="Function that makes the model; FILE.py:… works too. Or give --level.",
        show_default=False,
    ),
]
NumRanks: TypeAlias = Annotated[
    int, typer.Option("--ranks", "-p", metavar="N", min=1, help="Number of ranks.")
]
RankMemory: TypeAlias = Annotated[
    str | None, typer.Option("--memory", metavar="BYTES", help="Memory of each rank, such as 8GiB.")
]
MicrobatchChoices: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--microbatches", "-m", metavar="N,...", help="Numbers to choose from, such as 8,16."
    ),
]
StageChoices: TypeAlias = Annotated[
    str,
    typer.Option("--stages-per-rank", "-v", metavar="N,...", help="Numbers to choose from."),
]
Measure: TypeAlias = Annotated[
    bool, typer.Option("--measure", help="Measure layers here; otherwise count operations.")
]
Speed: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="X", help="Operations that a rank does per second, such as 1e14."),
]
LeastDelay: TypeAlias = Annotated[
    float, typer.Option("--delay", metavar="TIME", min=0, help="Least time of a message.")
]
Overhead: TypeAlias = Annotated[
    float, typer.Option(metavar="TIME", min=0, help="Time of an action besides its work.")
]
Batch: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Number of samples in a batch, with --level."),
]
MicrobatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--mb-size", metavar="N", min=1, help="Number of samples in the microbatches of the files."
    ),
]
SaveCosts: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="File for the costs of the stages, for show."),
]

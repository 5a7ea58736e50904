"""Options that several commands share."""

from typing import Annotated, Literal, TypeAlias

import typer

from penstock.costs.amounts import LARGEST_AMOUNT

Ranks: TypeAlias = Annotated[
    int | None,
    typer.Option("--ranks", "-p", metavar="N", min=1, help="Number of ranks; 4 if not given."),
]
Microbatches: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--microbatches", "-m", metavar="N", min=1, help="Number of microbatches; 8 if not given."
    ),
]
StagesPerRank: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--stages-per-rank",
        "-v",
        metavar="N",
        min=1,
        help="Number of stages per rank, for schedules that take any.",
    ),
]
CostsText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--costs",
        metavar="F,I,W|FILE",
        help="Times of a rank's forward, input and weight backward, in any unit, 1,1,1 if not "
        "given; or a file written by CostTable.save; or a recording.",
    ),
]
Delay: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--delay",
        metavar="TIME",
        min=0,
        max=LARGEST_AMOUNT,
        help="Time that a message between ranks takes.",
    ),
]
LengthsText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="N,N,…",
        help="Tokens of each microbatch. The costs are then those of a microbatch of mean length.",
    ),
]
WorkText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--work",
        metavar="A,B",
        help="Times of microbatches by --lengths: A for each token, B for its squared length; 1,0 "
        "if not given.",
    ),
]
GatherCosts: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--gather-costs",
        metavar="G,R,M",
        help="Times of gathering a rank's sharded parameters and of reducing their gradients, and "
        "the memory that they hold while gathered; 0,0,0 if not given.",
    ),
]
GathersText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--gathers",
        metavar="POLICY",
        help="Gather sharded stages once, per-need or at-most:K at a time, and ahead:N actions "
        "early, such as per-need,ahead:2. Without gathers: none.",
    ),
]
GathersOrAuto: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--gathers",
        metavar="POLICY|auto",
        help="Gather sharded stages once, per-need or at-most:K at a time, and ahead:N actions "
        "early, such as per-need,ahead:2; or by the best policy within the memory: auto.",
    ),
]
Recompute: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--recompute",
        help="Let searches recompute forwards for their backwards where that saves time within the "
        "memory.",
    ),
]
Memory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="CAP",
        help="Memory that a rank may hold, such as 4 or 8GiB, in the unit of the costs; without a "
        "file of costs, in microbatches. Or one for each rank: 4,4,6,8.",
    ),
]
ClockName: TypeAlias = Annotated[
    Literal["makespan", "span"],
    typer.Option("--clock", help="Time to compare: of all ranks together, or of each rank alone."),
]
Names: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="NAME", help="Names, CSV files or recordings.")
]
Seconds: TypeAlias = Annotated[
    float, typer.Option(metavar="SECONDS", help="Longest time to search.")
]
Effort: TypeAlias = Annotated[
    float, typer.Option(metavar="X", help="Amount to try; 0.1 is quick, 10 is thorough.")
]
Output: TypeAlias = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="File to write; - is stdout.")
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print only JSON, for other programs.")
]

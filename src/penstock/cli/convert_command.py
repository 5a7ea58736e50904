"""`penstock convert`: write a schedule as CSV, with or without sends and receives."""

import sys
from typing import Annotated, Literal

import typer

from penstock.cli.files import PIPE, check_output, write_text
from penstock.cli.gathers_option import place_gathers
from penstock.cli.given import ShapeOptions, describe_shape, read_schedules
from penstock.cli.options import GathersText, Microbatches, Output, Ranks, StagesPerRank
from penstock.ir import Schedule
from penstock.passes import add_comms, fuse_backward, remove_comms, split_backward


def convert(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name, a CSV file or a recording; - is stdin.")
    ],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    output: Output = None,
    comms: Annotated[
        bool | None,
        typer.Option("--comms/--no-comms", help="With or without sends and receives."),
    ] = None,
    split: Annotated[
        bool | None,
        typer.Option(
            "--split/--fuse", help="Split full backwards, or join halves that are neighbours."
        ),
    ] = None,
    gathers: GathersText = None,
    torch: Annotated[
        Literal["2.13", "2.14", "2.15"],
        typer.Option(
            "--torch",
            help="Version of torch to write for: 2.15 needs cells that wait for sends and "
            "reductions, which others do not know.",
        ),
    ] = "2.13",
) -> None:
    """Write a schedule as CSV, the format that PyTorch reads.

    Without an option, that part of the schedule is not changed.

    \b
    penstock convert ZB-V -p 4 -m 8 -o zb_v.csv
    penstock convert zb_v.csv --comms --gathers once -o for_torch.csv
    penstock convert 1F1B --split | penstock simulate -
    penstock convert ZB-V --gathers per-need -o sharded.csv
    """
    check_output(output, inputs=[name])
    [given] = read_schedules([name], ShapeOptions(ranks, microbatches, stages_per_rank))
    schedule = place_gathers(_convert(given.schedule, comms=comms, split=split), gathers)
    write_text(output, schedule.to_csv(has_waits=torch not in ("2.13", "2.14")))
    if output not in (None, PIPE):
        print(f"wrote {output}: {describe_shape(schedule)}")
    if comms and not schedule.has_sharding:
        print(
            "note: torch divides gradients by the number of microbatches at REDUCE_GRAD cells, of "
            "which there are none. For torch, add --gathers once, or divide the loss.",
            file=sys.stderr,
        )


def _convert(schedule: Schedule, *, comms: bool | None, split: bool | None) -> Schedule:
    wants_comms = schedule.has_comms if comms is None else comms
    if split is True:
        schedule = split_backward(schedule)
    elif split is False:
        # The send between two halves keeps them apart.
        schedule = fuse_backward(remove_comms(schedule))
    if wants_comms and not schedule.has_comms:
        return add_comms(schedule)
    return schedule if wants_comms else remove_comms(schedule)

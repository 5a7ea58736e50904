"""`penstock show`: draw schedules in the terminal or as a file."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.costs_option import read_costs, with_gather_costs
from penstock.cli.files import PIPE, check_output
from penstock.cli.given import Given, ShapeOptions, choose_costs, read_schedules
from penstock.cli.lengths_option import read_lengths
from penstock.cli.options import (
    CostsText,
    Delay,
    GatherCosts,
    GathersText,
    LengthsText,
    Microbatches,
    Names,
    Ranks,
    StagesPerRank,
    WorkText,
)
from penstock.cli.screen import console
from penstock.costs.given_costs import GivenCosts, ShareCosts
from penstock.costs.units import TimeUnit
from penstock.draw import Panel, save
from penstock.draw.output import PICTURES
from penstock.errors import OptionError
from penstock.sim import simulate


def show(
    names: Names,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    costs: CostsText = None,
    delay: Delay = None,
    lengths: LengthsText = None,
    work: WorkText = None,
    gather_costs: GatherCosts = None,
    gathers: GathersText = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Draw to a file: .svg or .png, an .html page, or .json for Perfetto.",
        ),
    ] = None,
    dark: Annotated[
        bool, typer.Option("--dark", help="Draw the picture on a dark background.")
    ] = False,
    width: Annotated[
        int | None,
        typer.Option(
            "--width",
            metavar="N",
            min=20,
            max=1000,
            help="Characters in a line; the terminal's if not given.",
        ),
    ] = None,
) -> None:
    """Draw schedules over time, with bubbles and memory.

    Several are drawn below each other, on one time axis.

    NAME is a schedule ("penstock list" lists them all), a CSV file, or a recording of a real run.
    For a recording, its typical step is drawn in seconds, with the simulated one beneath; other
    schedules are simulated with the measured costs.

    \b
    penstock show ZB-V -p 4 -m 8
    penstock show 1F1B ZB-H1 ZB-V -p 8 -m 32 --costs 1,1,0.8 --delay 0.1
    penstock show best.csv 1F1B --costs costs.json -o best.svg
    penstock show run.json -o run.html
    """
    check_output(output, inputs=names)
    _check_dark(dark, output)
    named = None if costs is None else read_costs(costs, delay)
    sizes = read_lengths(lengths, work)
    shape = ShapeOptions(ranks, microbatches, stages_per_rank, sizes.num_microbatches)
    given = read_schedules(names, shape, named, gathers=gathers)
    chosen = sizes.apply(with_gather_costs(choose_costs(given, named, delay), gather_costs))
    for one in given:
        if one.recording is not None and isinstance(chosen, ShareCosts):
            raise OptionError(
                f"--costs is {costs}, but {one.name} was measured in seconds and has costs of its "
                "own. Leave --costs out, or give a file."
            )
    # Schedules drawn with a measured step share its axis.
    is_in_seconds = chosen.time_unit == "s" or any(one.recording for one in given)
    panels = [_panel(one, chosen, is_in_seconds) for one in given]
    if output in (None, PIPE):
        # rich is loaded only for the terminal.
        from penstock.draw.in_terminal import print_panels

        print_panels(panels, console(width))
        return
    assert output is not None
    save(panels, output, dark=dark)
    print(f"wrote {output}")


def _check_dark(dark: bool, output: str | None) -> None:
    if dark and (output is None or Path(output).suffix.lower() not in PICTURES):
        raise OptionError(
            "--dark is for pictures. Give --output a file that ends in .svg or .png; a page "
            "follows the reader's own setting."
        )


def _panel(given: Given, costs: GivenCosts, is_in_seconds: bool) -> Panel:
    table = costs.table(given.schedule.placement)
    if given.recording is not None:
        measured, simulated = given.recording.typical(table), given.recording.simulated(table)
        return Panel(
            f"{given.name}, measured",
            measured,
            time_unit="s",
            # A file of costs has no units: beside measured memory, it is taken to be in bytes.
            memory_unit="bytes" if given.recording.memory else costs.memory_unit,
            beneath=simulated,
        )
    report = simulate(given.schedule, table)
    time_unit: TimeUnit = "s" if is_in_seconds else ""
    return Panel(given.name, report, time_unit=time_unit, memory_unit=costs.memory_unit)

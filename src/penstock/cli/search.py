"""`penstock search`: the schedule made for given costs and memory."""

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.amounts import to_caps
from penstock.cli.costs import Costs, choose_stages_per_rank, read_costs
from penstock.cli.files import PIPE, check_output, write_text
from penstock.cli.given import ShapeOptions
from penstock.cli.options import (
    AsJson,
    ClockName,
    CostsText,
    Delay,
    Memory,
    Microbatches,
    Output,
    Ranks,
)
from penstock.cli.screen import print_json, print_table, sign_of_life
from penstock.errors import OptionError
from penstock.ir import Placement
from penstock.planner import SearchResult
from penstock.planner import search as find
from penstock.planner.placements import default_placements, describe


class PlacementName(StrEnum):
    """The placements that have a name."""

    LINEAR = "linear"
    LOOP = "loop"
    V = "v"


def search(
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: Annotated[
        int | None,
        typer.Option(
            "--stages-per-rank",
            "-v",
            metavar="N",
            min=1,
            help="How many stages a rank has; 1 if not given, 2 in a loop or V. A file of costs "
            "says it by itself.",
        ),
    ] = None,
    costs: CostsText = None,
    delay: Delay = None,
    memory: Memory = None,
    placement: Annotated[
        list[PlacementName] | None,
        typer.Option("--placement", help="How stages are placed on ranks; may be repeated."),
    ] = None,
    clock: ClockName = "makespan",
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="When to stop, if it is not done before.")
    ] = 60.0,
    effort: Annotated[
        float, typer.Option(metavar="X", help="How much is tried; 10 is thorough.")
    ] = 1.0,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Find the best schedule for given costs and memory.

    Prints what was tried, the fastest first, and how far the best is from a time that no schedule
    can beat: a gap of 0 is a proof. The best is written as CSV if a file is given.

    \b
    penstock search -p 4 -m 8 --costs 1,1.2,0.8 --memory 3
    penstock search -p 4 -m 8 --placement v --delay 0.1 -o best.csv
    penstock search -p 4 -m 16 --costs costs.json --memory 8GiB --json
    """
    if as_json and output == PIPE:
        raise OptionError("--json and --output - would both print. Give one of them.")
    check_output(output, inputs=[] if costs is None else [costs])
    num_ranks, num_microbatches = ShapeOptions(ranks, microbatches, None).of()
    chosen = read_costs(costs, delay)
    placements = _placements(chosen, num_ranks, stages_per_rank, placement or [])
    with sign_of_life("Searching"):
        found = find(
            chosen.table(placements[0]),
            num_ranks,
            num_microbatches,
            memory=to_caps(memory),
            placements=placements,
            clock=clock,
            seconds=seconds,
            effort=effort,
        )
    if output is not None:
        write_text(output, found.schedule.to_csv())
    if as_json:
        print_json(_facts(found))
    elif output != PIPE:
        _print(found)
        if output is not None:
            print(f"wrote {output}")


def _placements(
    costs: Costs, num_ranks: int, stages_per_rank: int | None, names: Collection[PlacementName]
) -> list[Placement]:
    """Those to choose from; all have as many stages."""
    is_folded = any(name is not PlacementName.LINEAR for name in names)
    count = choose_stages_per_rank(costs, num_ranks, stages_per_rank) or (2 if is_folded else 1)
    if PlacementName.LINEAR in names and count > 1:
        raise OptionError(
            f"--placement is linear, but each rank has {count} stages. Use loop or v, or one "
            "stage for each rank."
        )
    return [
        placement
        for placement in default_placements(num_ranks * count, num_ranks)
        if not names or any(placement == _make(name, num_ranks, count) for name in names)
    ]


def _make(name: PlacementName, num_ranks: int, count: int) -> Placement:
    make = Placement.v if name is PlacementName.V else Placement.loop
    return make(num_ranks, stages_per_rank=count)


def _print(found: SearchResult) -> None:
    header = ("tried", "placement", found.clock, "memory", "fits", "of")
    rows = [
        (
            tried.name,
            tried.placement,
            f"{tried.time:.5g}",
            f"{tried.peak_memory:.5g}",
            "yes" if tried.fits else "no",
            str(tried.count),
        )
        for tried in sorted(found.tried, key=lambda tried: (not tried.fits, tried.time))
    ]
    print_table(header, rows, words=("tried", "placement", "fits"))
    report = found.report
    bubble = report.bubble_by_makespan if found.clock == "makespan" else report.bubble_by_span
    stopped = "" if found.is_complete else f", stopped after {found.seconds:.1f} s"
    print(
        f"best: {found.clock} {found.time:.5g}, bubble {bubble:.2%}, peak memory "
        f"{report.peak_memory:.5g}, {describe(found.schedule.placement)}"
    )
    print(f"bound: {found.lower_bound:.5g}, gap {found.gap:.2%}{stopped}")


def _facts(found: SearchResult) -> dict[str, Any]:
    report = found.report
    return {
        "clock": found.clock,
        "time": found.time,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "makespan": report.makespan,
        "span": report.span,
        "bubble_by_makespan": report.bubble_by_makespan,
        "bubble_by_span": report.bubble_by_span,
        "peak_memory": report.peak_memory,
        "placement": describe(found.schedule.placement),
        "is_complete": found.is_complete,
        "seconds": found.seconds,
        "tried": [
            {
                "name": tried.name,
                "placement": tried.placement,
                "time": tried.time,
                "peak_memory": tried.peak_memory,
                "fits": tried.fits,
                "count": tried.count,
            }
            for tried in found.tried
        ],
        "schedule": found.schedule.to_csv(),
    }

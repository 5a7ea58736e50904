"""`penstock simulate`: print the times, bubbles and memory of schedules."""

from typing import Annotated, Any

import typer

from penstock.cli.costs_option import read_costs, with_gather_costs
from penstock.cli.facts import facts_of
from penstock.cli.given import Given, ShapeOptions, choose_costs, describe_shape, read_schedules
from penstock.cli.lengths_option import read_lengths
from penstock.cli.options import (
    AsJson,
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
from penstock.cli.screen import print_json, print_table
from penstock.draw.panel import Panel
from penstock.sim import simulate as run
from penstock.solver.placement_choices import describe
from penstock.timeline import Report


def simulate(
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
    blocking: Annotated[
        bool, typer.Option("--blocking", help="Let sends and receives block their ranks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the times, bubbles and memory of schedules.

    NAME is a schedule ("penstock list" lists them all), a CSV file, or a recording of a real run.
    With a recording, its schedule and the others are simulated with the measured costs.

    \b
    penstock simulate ZB-V -p 4 -m 8
    penstock simulate 1F1B ZB-H1 -p 8 -m 32 --costs 1,1,0.8 --delay 0.1
    penstock simulate ZB-V --gathers per-need --gather-costs 0.5,0.5,2
    penstock simulate ZB-H1 -p 2 --lengths 512,2048,1024,512 --work 1,0.0002
    """
    named = None if costs is None else read_costs(costs, delay)
    sizes = read_lengths(lengths, work)
    shape = ShapeOptions(ranks, microbatches, stages_per_rank, sizes.num_microbatches)
    given = read_schedules(names, shape, named, gathers=gathers)
    chosen = sizes.apply(with_gather_costs(choose_costs(given, named, delay), gather_costs))
    panels = [
        Panel(
            one.name,
            run(one.schedule, chosen.table(one.schedule.placement), blocking=blocking),
            time_unit=chosen.time_unit,
        )
        for one in given
    ]
    if as_json:
        print_json([_facts(one, panel.report) for one, panel in zip(given, panels, strict=True)])
        return
    for number, (one, panel) in enumerate(zip(given, panels, strict=True)):
        if number:
            print()
        _print(one, panel)


def _print(given: Given, panel: Panel) -> None:
    print(f"{given.name}: {describe_shape(given.schedule)}")
    print(panel.facts)
    header = ("rank", "stages", "busy", "idle", "warm-up", "steady", "cool-down", "peak memory")
    rows = [
        (
            str(number),
            " ".join(map(str, given.schedule.placement.stages_of(number))),
            *map(panel.time, (rank.busy, rank.idle.total, *rank.idle)),
            panel.memory(rank.peak_memory),
        )
        for number, rank in enumerate(panel.report.ranks)
    ]
    print_table(header, rows, words=("stages",))


def _facts(given: Given, report: Report) -> dict[str, Any]:
    schedule = given.schedule
    return {
        "name": given.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "placement": describe(schedule.placement),
        **facts_of(report),
        "ranks": [
            {
                "rank": number,
                "stages": schedule.placement.stages_of(number),
                "first_start": rank.first_start,
                "last_end": rank.last_end,
                "busy": rank.busy,
                "idle": rank.idle._asdict(),
                "peak_memory": rank.peak_memory,
            }
            for number, rank in enumerate(report.ranks)
        ],
    }

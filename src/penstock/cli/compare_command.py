"""`penstock compare`: all schedules, and a searched one, for the same costs and memory."""

from typing import Annotated, Any

import typer

from penstock.cli.costs_option import choose_stages_per_rank, read_costs, with_gather_costs
from penstock.cli.facts import facts_of
from penstock.cli.gathers_option import read_gathers
from penstock.cli.given import Given, ShapeOptions, choose_costs, read_schedules
from penstock.cli.lengths_option import read_lengths
from penstock.cli.options import (
    AsJson,
    ClockName,
    CostsText,
    Delay,
    GatherCosts,
    GathersOrAuto,
    LengthsText,
    Memory,
    Microbatches,
    Ranks,
    Recompute,
    StagesPerRank,
    WorkText,
)
from penstock.cli.screen import print_json, print_table, sign_of_life
from penstock.costs.amounts import to_caps
from penstock.costs.given_costs import ShareCosts
from penstock.costs.units import in_time
from penstock.errors import OptionError
from penstock.schedules import REGISTRY
from penstock.solver.chosen_orders import (
    backward_order,
    count_recomputed,
    describe_order,
    describe_recomputed,
    forward_order,
)
from penstock.solver.comparison import SEARCHED, Comparison
from penstock.solver.placement_choices import describe
from penstock.solver.question import Question


def compare(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Schedules of your own, as CSV files."),
    ] = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    costs: CostsText = None,
    delay: Delay = None,
    lengths: LengthsText = None,
    work: WorkText = None,
    gather_costs: GatherCosts = None,
    gathers: GathersOrAuto = None,
    recompute: Recompute = False,
    memory: Memory = None,
    clock: ClockName = "makespan",
    search: Annotated[bool, typer.Option(help="Search for better schedules too.")] = True,
    as_json: AsJson = False,
) -> None:
    """Compare all schedules for the same costs.

    The best comes first. A searched schedule is included for each number of stages.

    The gap is how much slower a schedule is than a time that no schedule with its placement can
    beat. Schedules that exceed the memory, or do not fit the numbers, come last with the reason.
    With --recompute, searched schedules may recompute forwards.

    \b
    penstock compare -p 4 -m 8
    penstock compare -p 8 -m 32 --costs 1,1,0.8 --delay 0.1 --memory 8
    penstock compare best.csv --costs costs.json --clock span
    penstock compare --gathers auto --gather-costs 0.5,0.5,2 --memory 6
    penstock compare --recompute --memory 3 --lengths 512,2048,1024,512
    """
    if recompute and not search:
        raise OptionError(
            "--recompute and --no-search were both given, but only searched schedules recompute. "
            "Leave one of them out."
        )
    sizes = read_lengths(lengths, work)
    shape = ShapeOptions(ranks, microbatches, None, sizes.num_microbatches)
    named = None if costs is None else read_costs(costs, delay)
    given = read_schedules(files or [], shape, named)
    chosen = sizes.apply(with_gather_costs(choose_costs(given, named, delay), gather_costs))
    numbers = shape.of(given[0].schedule if given else None, chosen)
    for one in given:
        _check_same(one, *numbers)
    count = choose_stages_per_rank(chosen, numbers[0], stages_per_rank)
    caps = to_caps(memory, in_microbatches=isinstance(chosen, ShareCosts))
    policy = read_gathers(gathers)
    comparison = Comparison(Question(chosen, *numbers, caps, clock, policy, recompute))
    for one in given:
        comparison.add(one.name, one.schedule)
    for generator in REGISTRY:
        comparison.add_registered(generator, count)
    comparison.check_memory()
    if search:
        with sign_of_life("Searching"):
            comparison.search()
    if as_json:
        print_json(_facts(comparison))
    else:
        _print(comparison)


def _check_same(given: Given, num_ranks: int, num_microbatches: int) -> None:
    schedule = given.schedule
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, num_microbatches):
        raise OptionError(
            f"{given.name} has {schedule.num_ranks} ranks and {schedule.num_microbatches} "
            f"microbatches, but others have {num_ranks} and {num_microbatches}. Compare schedules "
            "for the same numbers."
        )


def _print(comparison: Comparison) -> None:
    unit = comparison.question.costs.time_unit
    header = ["schedule", comparison.question.clock, "bubble", "peak memory", "gap", "placement"]
    rows = [
        [
            row.name,
            in_time(row.time, unit),
            f"{row.bubble:.2%}",
            f"{row.report.peak_memory:.5g}",
            "" if row.gap is None else f"{row.gap:.2%}",
            describe(row.placement),
            row.excess,
        ]
        for row in comparison.rows
    ]
    rows += [[name, "", "", "", "", "", why] for name, why in comparison.left_out.items()]
    if any(row[-1] for row in rows):
        header.append("why not")
    rows = [row[: len(header)] for row in rows]
    print_table(header, rows, words=("schedule", "placement", "why not"))
    print(comparison.bound_in_words)
    searched = [row.schedule for row in comparison.rows if row.name.startswith(SEARCHED)]
    for schedule in searched[:1]:
        if any(count_recomputed(schedule)):
            print(f"The best searched schedule: {describe_recomputed(schedule)}")
        if comparison.question.costs.num_microbatches is not None:
            print(f"The best searched schedule: {describe_order(schedule)}")


def _facts(comparison: Comparison) -> dict[str, Any]:
    question = comparison.question
    return {
        "num_ranks": question.num_ranks,
        "num_microbatches": question.num_microbatches,
        "clock": question.clock,
        "memory": question.memory,
        "schedules": [
            {
                "name": row.name,
                "placement": describe(row.placement),
                **facts_of(row.report),
                "lower_bound": comparison.bounds[row.placement],
                "gap": row.gap,
                "fits": row.excess == "",
                "excess": row.excess,
                "recomputed": count_recomputed(row.schedule),
                "forward_order": forward_order(row.schedule),
                "backward_order": backward_order(row.schedule),
            }
            for row in comparison.rows
        ],
        "left_out": comparison.left_out,
    }

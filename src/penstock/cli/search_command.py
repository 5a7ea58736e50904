"""`penstock search`: find the best schedule for given costs and memory."""

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.costs_option import choose_stages_per_rank, read_costs, with_gather_costs
from penstock.cli.facts import advice_facts, facts_of
from penstock.cli.files import PIPE, check_output, write_text
from penstock.cli.gathers_option import read_gathers
from penstock.cli.given import ShapeOptions
from penstock.cli.lengths_option import read_lengths
from penstock.cli.options import (
    AsJson,
    ClockName,
    CostsText,
    Delay,
    Effort,
    GatherCosts,
    GathersOrAuto,
    LengthsText,
    Memory,
    Microbatches,
    Output,
    Ranks,
    Recompute,
    Seconds,
    WorkText,
)
from penstock.cli.screen import print_json, print_table, sign_of_life
from penstock.costs.amounts import to_caps
from penstock.costs.given_costs import GivenCosts, ShareCosts
from penstock.costs.units import TimeUnit, in_time
from penstock.errors import OptionError
from penstock.ir import Placement
from penstock.solver import SearchResult
from penstock.solver.best_schedule import advise_on, find_best
from penstock.solver.chosen_orders import describe_order, describe_recomputed
from penstock.solver.placement_choices import default_placements, describe
from penstock.solver.question import Question


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
            help="Number of stages per rank; both 1 and 2 are tried if not given. A file of "
            "costs has its own number.",
        ),
    ] = None,
    costs: CostsText = None,
    delay: Delay = None,
    lengths: LengthsText = None,
    work: WorkText = None,
    gather_costs: GatherCosts = None,
    gathers: GathersOrAuto = None,
    recompute: Recompute = False,
    memory: Memory = None,
    placement: Annotated[
        list[PlacementName] | None,
        typer.Option(
            "--placement", help="Placement of stages on ranks; all are tried if not given."
        ),
    ] = None,
    clock: ClockName = "makespan",
    seconds: Seconds = 60.0,
    effort: Effort = 1.0,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Find the best schedule for given costs and memory.

    Prints the schedules that were tried, the fastest first, and the gap of the best to a time that
    no schedule can beat; a gap of 0 proves that none is faster. Then it says what limits the best,
    and what would help, in brief searches of their own. The best is written as CSV if a file is
    given.

    \b
    penstock search -p 4 -m 8 --costs 1,1.2,0.8 --memory 3
    penstock search -p 4 -m 8 --placement v --delay 0.1 -o best.csv
    penstock search -p 4 -m 16 --costs costs.json --memory 8GiB --json
    penstock search -p 4 -m 8 --gathers auto --gather-costs 0.5,0.5,2 --memory 6
    penstock search -p 4 -m 8 --recompute --memory 2
    """
    if as_json and output == PIPE:
        raise OptionError("--json and --output - would both print. Give one of them.")
    check_output(output, inputs=[] if costs is None else [costs])
    sizes = read_lengths(lengths, work)
    chosen = sizes.apply(with_gather_costs(read_costs(costs, delay), gather_costs))
    policy = read_gathers(gathers)
    num_ranks, num_microbatches = ShapeOptions(ranks, microbatches, None).of(None, chosen)
    groups = _placements(chosen, num_ranks, stages_per_rank, placement or [])
    caps = to_caps(memory, in_microbatches=isinstance(chosen, ShareCosts))
    with sign_of_life("Searching"):
        question = Question(chosen, num_ranks, num_microbatches, caps, clock, policy, recompute)
        found = find_best(question, groups, seconds=seconds, effort=effort)
        advice = advise_on(question, found, groups, seconds=seconds / 4, effort=effort)
    if output is not None:
        write_text(output, found.schedule.to_csv())
    if as_json:
        print_json(_facts(found) | advice_facts(advice))
    elif output != PIPE:
        _print(found, chosen.time_unit)
        print(advice)
        if output is not None:
            print(f"wrote {output}")


def _placements(
    costs: GivenCosts, num_ranks: int, stages_per_rank: int | None, names: Collection[PlacementName]
) -> list[list[Placement]]:
    """Return the placements to choose from, in lists with the same number of stages."""
    count = choose_stages_per_rank(costs, num_ranks, stages_per_rank)
    if count is not None and count > 1 and PlacementName.LINEAR in names:
        raise OptionError(
            f"--placement is linear, but each rank has {count} stages. Use loop or v, or one "
            "stage for each rank."
        )
    usual = {1 if name is PlacementName.LINEAR else 2 for name in names} or {1, 2}
    return [
        [
            placement
            for placement in default_placements(num_ranks * count, num_ranks)
            if not names or placement in [_make(name, num_ranks, count) for name in names]
        ]
        for count in (sorted(usual) if count is None else [count])
    ]


def _make(name: PlacementName, num_ranks: int, count: int) -> Placement:
    if name is PlacementName.LINEAR:
        return Placement.linear(num_ranks)
    make = Placement.v if name is PlacementName.V else Placement.loop
    return make(num_ranks, stages_per_rank=count)


def _print(found: SearchResult, unit: TimeUnit) -> None:
    header = ("tried", "placement", found.clock, "memory", "fits", "of")
    rows = [
        (
            tried.name,
            tried.placement,
            in_time(tried.time, unit),
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
        f"best: {found.clock} {in_time(found.time, unit)}, bubble {bubble:.2%}, peak memory "
        f"{report.peak_memory:.5g}, {describe(found.schedule.placement)}"
    )
    print(f"bound: {in_time(found.lower_bound, unit)}, gap {found.gap:.2%}{stopped}")
    if found.recompute:
        print(describe_recomputed(found.schedule))
    if report.costs.num_microbatches is not None:
        print(describe_order(found.schedule))


def _facts(found: SearchResult) -> dict[str, Any]:
    report = found.report
    return {
        "clock": found.clock,
        "time": found.time,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        **facts_of(report),
        "placement": describe(found.schedule.placement),
        "is_complete": found.is_complete,
        "seconds": found.seconds,
        "recomputed": found.recomputed,
        "forward_order": found.forward_order,
        "backward_order": found.backward_order,
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

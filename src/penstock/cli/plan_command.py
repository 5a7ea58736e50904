"""`penstock plan`: choose the cut, the number of microbatches and the schedule for a model."""

from typing import TYPE_CHECKING, Any

from penstock.cli.facts import advice_facts
from penstock.cli.files import PIPE, check_output, write_text
from penstock.cli.lengths_option import read_lengths
from penstock.cli.levels_option import LevelTexts, read_levels
from penstock.cli.made_model import make_given, quieten_torch
from penstock.cli.options import AsJson, Effort, LengthsText, Output, Seconds, WorkText
from penstock.cli.plan_options import (
    Batch,
    LeastDelay,
    Measure,
    MicrobatchChoices,
    MicrobatchSize,
    ModelFunction,
    NumRanks,
    Overhead,
    RankMemory,
    SaveCosts,
    Speed,
    StageChoices,
)
from penstock.cli.screen import print_json, print_table, sign_of_life
from penstock.costs.amounts import to_amount, to_counts
from penstock.costs.memory_levels import describe_levels
from penstock.costs.units import MemoryUnit, TimeUnit, in_memory, in_time
from penstock.errors import OptionError
from penstock.solver.placement_choices import describe
from penstock.user_code import errors_in_one_line

if TYPE_CHECKING:  # torch is loaded when the command runs.
    from penstock.planning import Plan, PlanRow


def plan(
    function: ModelFunction = None,
    ranks: NumRanks = 4,
    memory: RankMemory = None,
    microbatches: MicrobatchChoices = None,
    lengths: LengthsText = None,
    work: WorkText = None,
    stages_per_rank: StageChoices = "1,2",
    measure: Measure = False,
    speed: Speed = None,
    delay: LeastDelay = 0.0,
    overhead: Overhead = 0.0,
    level: LevelTexts = None,
    batch: Batch = None,
    mb_size: MicrobatchSize = None,
    seconds: Seconds = 60.0,
    effort: Effort = 1.0,
    output: Output = None,
    save_costs: SaveCosts = None,
    as_json: AsJson = False,
) -> None:
    """Plan how to cut a model, and how to train it.

    Prints the best cuts, numbers of microbatches and schedules; what the best recomputes, the order
    of its microbatches if --lengths are given, what limits it, and what would help. The machines
    are not needed yet.

    FUNCTION takes no argument and returns the model and its arguments for a whole batch, as
    (model, args) or (model, args, kwargs). A loss function and a target may follow, which count
    with the last layer. On the meta device, nothing is computed.
    Times are in operations; with --speed or --measure they are in seconds, and so are --delay and
    --overhead. The best schedule is written as CSV if a file is given.

    Stages whose costs were measured at several memory levels are given as --level, with --batch and
    --mb-size in place of a function. A level is chosen for each stage.

    \b
    penstock plan my_model:make -p 4 --memory 8GiB
    penstock plan my_model.py:make -p 8 --speed 1e14 -o best.csv --save-costs costs.json
    penstock plan my_model:make -p 2 --measure --microbatches 4,8 --json
    penstock plan --level 1=full.json --level 0.5=half.json --batch 64 --mb-size 4 --memory 8GiB
    """
    if as_json and output == PIPE:
        raise OptionError("--json and --output - would both print. Give one of them.")
    check_output(output)
    check_output(save_costs, option="--save-costs")
    sizes = read_lengths(lengths, work)
    options: dict[str, Any] = {
        "lengths": sizes.lengths,
        "work": None if work is None else sizes.work,
        "memory": None if memory is None else to_amount("--memory", memory),
        "microbatches": to_counts("--microbatches", microbatches),
        "stages_per_rank": to_counts("--stages-per-rank", stages_per_rank),
        "measure": measure,
        "speed": speed,
        "delay": delay,
        "overhead": overhead,
        "seconds": seconds,
        "effort": effort,
    }
    _check_source(function, level, {"--batch": batch, "--mb-size": mb_size})
    with sign_of_life("Planning"):
        if function is None:
            found = _plan_levels(level or [], ranks, options | {"batch": batch, "mb_size": mb_size})
        else:
            found = _plan(function, ranks, options)
        advice = found.best.advise(seconds=seconds / 4, effort=effort)
    _write(found, output, save_costs)
    if as_json:
        print_json(_facts(found) | advice_facts(advice))
    elif output != PIPE:
        _print(found, "s" if measure or speed is not None else "", "" if level else "bytes")
        print(advice)
        for path in filter(None, (output, save_costs)):
            print(f"wrote {path}")


def _check_source(
    function: str | None, level: list[str] | None, sizes: dict[str, int | None]
) -> None:
    """Raise an error unless either a function or levels with their sizes are given."""
    if function is None and not level:
        raise OptionError(
            "Nothing to plan was given. Expected MODULE:FUNCTION, for a model, or --level, for "
            "costs of its stages."
        )
    if function is not None and level:
        raise OptionError(
            f"{function} and --level were both given. Expected a model, or costs of its stages: "
            "leave one of them out."
        )
    for name, size in sizes.items():
        if level and size is None:
            raise OptionError(f"{name} is missing. Give it with --level: a number of samples.")
        if function is not None and size is not None:
            raise OptionError(f"{name} is {size}. It is for --level: leave it out.")


def _write(found: "Plan", output: str | None, save_costs: str | None) -> None:
    """Write the best schedule and its costs to the files that are given."""
    if output is not None:
        write_text(output, found.best.schedule.to_csv())
    if save_costs is not None:
        write_text(save_costs, found.best.costs.to_json())


def _plan(name: str, num_ranks: int, options: dict[str, Any]) -> "Plan":
    from penstock.planning import plan as make_plan

    model, question = make_given(name)
    quieten_torch()
    with errors_in_one_line("The model failed"):
        return make_plan(model, num_ranks, **question, **options)


def _plan_levels(texts: list[str], num_ranks: int, options: dict[str, Any]) -> "Plan":
    from penstock.planning import plan as make_plan

    return make_plan(read_levels(texts), num_ranks, **options)


def _print(found: "Plan", unit: TimeUnit, memory_unit: MemoryUnit) -> None:
    has_levels = bool(found.best.levels)
    header = ("schedule", "placement", "microbatches", "size", "time", "bubble", "memory", "gap")
    rows = [
        (
            row.schedule_name,
            describe(row.placement),
            str(row.num_microbatches),
            str(row.mb_size),
            in_time(row.time, unit),
            f"{row.bubble:.2%}",
            in_memory(max(row.memory), memory_unit),
            f"{row.gap:.2%}",
            *([describe_levels(row.levels)] if has_levels else []),
        )
        for row in found.rows
    ]
    words = ("schedule", "placement", "levels")
    print_table((*header, "levels") if has_levels else header, rows, words=words)
    stopped = "" if found.is_complete else ", stopped by its time budget"
    print(
        f"No schedule for any of the {found.num_considered} choices is faster than "
        f"{in_time(found.lower_bound, unit)}: gap {found.gap:.2%}{stopped}."
    )
    print(*found.best.sentences, sep="\n")
    for choice in found.left_out:
        where = describe(choice.placement)
        print(f"left out: {choice.num_microbatches} microbatches, {where}: {choice.reason}")


def _facts(found: "Plan") -> dict[str, Any]:
    return {
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "num_considered": found.num_considered,
        "is_complete": found.is_complete,
        "rows": [_row_facts(row) for row in found.rows],
        "left_out": [
            {
                "num_microbatches": choice.num_microbatches,
                "placement": describe(choice.placement),
                "reason": choice.reason,
            }
            for choice in found.left_out
        ],
    }


def _row_facts(row: "PlanRow") -> dict[str, Any]:
    return {
        "schedule_name": row.schedule_name,
        "placement": describe(row.placement),
        "num_microbatches": row.num_microbatches,
        "mb_size": row.mb_size,
        "time": row.time,
        "bubble": row.bubble,
        "lower_bound": row.lower_bound,
        "gap": row.gap,
        "memory": row.memory,
        "cut_points": row.cut_points,
        "levels": row.levels,
        "recomputed": row.recomputed,
        "forward_order": row.forward_order,
        "backward_order": row.backward_order,
        "schedule": row.schedule.to_csv(),
    }

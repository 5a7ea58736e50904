"""`penstock verify`: prove that schedules can be run."""

import sys
from typing import Annotated

import typer

from penstock.cli.costs_option import read_costs, with_gather_costs
from penstock.cli.given import Given, describe_shape, read_file
from penstock.cli.lengths_option import read_lengths
from penstock.cli.options import CostsText, GatherCosts, LengthsText, Memory
from penstock.costs.amounts import to_caps
from penstock.costs.given_costs import GivenCosts, ShareCosts
from penstock.errors import OptionError, PipelineError
from penstock.passes import verify as check


def verify(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="CSV files; - is stdin.")],
    costs: CostsText = None,
    gather_costs: GatherCosts = None,
    memory: Memory = None,
    lengths: LengthsText = None,
) -> None:
    """Prove that schedules can be run.

    Checks that they are complete, in order, free of deadlock, and within the memory.

    Prints a line for each file. If one cannot be run, the line names the action, and the exit code
    is 1.

    \b
    penstock verify best.csv
    penstock verify schedules/*.csv --memory 4
    penstock convert ZB-V | penstock verify -
    """
    if lengths is not None and memory is None:
        raise OptionError(f"--lengths is {lengths}, but only memory grows with it. Give --memory.")
    plain = with_gather_costs(read_costs(costs, None), gather_costs)
    chosen = read_lengths(lengths, None).apply(plain)
    caps = to_caps(memory, in_microbatches=isinstance(plain, ShareCosts))
    failed: PipelineError | None = None
    for path in files:
        try:
            given = read_file(path)  # This verifies all but the memory.
            if caps is not None:
                _check_memory(given, chosen, caps)
        except PipelineError as exc:
            if failed is not None:
                print(f"error: {' '.join(str(failed).split())}", file=sys.stderr)
            failed = exc  # The last one is raised, and main() prints it.
        else:
            print(f"{given.name}: ok: {describe_shape(given.schedule)}")
    if failed is not None:
        raise failed


def _check_memory(given: Given, costs: GivenCosts, caps: float | tuple[float, ...]) -> None:
    table = costs.table(given.schedule.placement)
    try:
        check(given.schedule, costs=table, memory=caps)
    except PipelineError as exc:
        raise type(exc)(f"{given.name}: {exc}") from exc

"""`penstock studio`: a page to play with."""

from collections.abc import Sequence
from typing import Annotated

import typer

from penstock.cli.costs import read_costs
from penstock.cli.options import CostsText, Delay, Memory, Microbatches, Ranks
from penstock.comparison import ShareCosts, StageCosts
from penstock.comparison.costs import mean_delay
from penstock.ir import Placement
from penstock.studio.inputs import DEFAULTS, read_inputs


def studio(
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    costs: CostsText = None,
    delay: Delay = None,
    memory: Memory = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=65535, help="Of the address; any that is free if it is 0."
        ),
    ] = None,
    is_opened: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in your browser.")
    ] = True,
) -> None:
    """Play with schedules on a page in your browser.

    Ranks, microbatches, costs, memory and schedule are changed there, and the timeline, the memory
    and the comparison of all schedules follow at once. Only this machine can reach the page, and
    the page asks no other. The options say what it begins with. Ctrl-C stops it.

    \b
    penstock studio
    penstock studio -p 8 -m 32 --costs 1,1,0.8 --delay 0.1 --memory 8
    penstock studio --costs costs.json --port 9000 --no-open
    """
    fields = _cost_fields(read_costs(costs, delay), ranks)
    if ranks is not None:
        fields["ranks"] = str(ranks)
    if microbatches is not None:
        fields["microbatches"] = str(microbatches)
    if memory is not None:
        fields["memory"] = memory
    read_inputs(fields)  # What is wrong is said here, not in the browser.
    # uvicorn and starlette take a while to load.
    from penstock.studio.serve import serve

    changed = {name: text for name, text in fields.items() if text != DEFAULTS[name]}
    serve(changed, port=port, is_opened=is_opened)


def _cost_fields(costs: ShareCosts | StageCosts, num_ranks: int | None) -> dict[str, str]:
    """What to type in for these costs."""
    if isinstance(costs, ShareCosts):
        return _fields(costs)
    table, schedule = costs.costs, costs.schedule
    if num_ranks is None:
        num_ranks = table.num_stages if schedule is None else schedule.num_ranks
    per_rank = table.num_stages / num_ranks

    def along(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * per_rank for value in values)

    placement = Placement.linear(table.num_stages) if schedule is None else schedule.placement
    fields = _fields(
        ShareCosts(
            forward=along(table.forward),
            backward_input=along(table.backward_input),
            backward_weight=along(table.backward_weight),
            after_forward=along(table.after_forward),
            after_input=along(table.after_input),
            delay=mean_delay(table, placement),
            overlap_saving=table.overlap_saving,
        )
    )
    shape = {} if schedule is None else {"microbatches": str(schedule.num_microbatches)}
    units = "seconds" if costs.time_unit == "s" else "any"
    return {**fields, **shape, "ranks": str(num_ranks), "units": units}


def _fields(costs: ShareCosts) -> dict[str, str]:
    return {
        "forward": _text(costs.forward),
        "backward_input": _text(costs.backward_input),
        "backward_weight": _text(costs.backward_weight),
        "activation": _text(costs.after_forward),
        "after_input": _text(costs.after_input),
        "delay": _text([costs.delay]),
        "overlap_saving": _text([costs.overlap_saving]),
    }


def _text(values: Sequence[float]) -> str:
    """With commas between, and short enough for an address."""
    shown = [f"{value:.6g}" for value in values]
    return shown[0] if len(set(shown)) == 1 else ",".join(shown)

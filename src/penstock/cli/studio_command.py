"""`penstock studio`: serve the studio, a page to explore schedules."""

from typing import Annotated

import typer

from penstock.cli.costs_option import read_costs
from penstock.cli.given import ShapeOptions
from penstock.cli.lengths_option import read_lengths
from penstock.cli.options import (
    CostsText,
    Delay,
    LengthsText,
    Memory,
    Microbatches,
    Ranks,
    Recompute,
    WorkText,
)
from penstock.costs.amounts import to_caps
from penstock.costs.cost_table import DURING, SCALES, SHARDING
from penstock.costs.given_costs import ShareCosts
from penstock.studio.typed_inputs import DEFAULTS, fields_of, read_inputs

_NOT_COUNTED = (*DURING, "during_dropping", "during_recompute", *SHARDING, *SCALES)


def studio(
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    costs: CostsText = None,
    delay: Delay = None,
    lengths: LengthsText = None,
    work: WorkText = None,
    recompute: Recompute = False,
    memory: Memory = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=65535, help="Port of the page; 0 for any that is free."
        ),
    ] = None,
    is_opened: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in your browser.")
    ] = True,
) -> None:
    """Explore schedules on a page in your browser.

    You change ranks, microbatches, costs, memory and schedule there; the timeline, the memory and
    the comparison of all schedules are updated at once. Only you can reach the page, from this
    machine, and the page contacts no other machine. The options set its first values. Ctrl-C stops
    it.

    \b
    penstock studio
    penstock studio -p 8 -m 32 --costs 1,1,0.8 --delay 0.1 --memory 8
    penstock studio --lengths 512,2048,1024,512
    penstock studio -m 12 --memory 2 --recompute
    penstock studio --costs costs.json --port 9000 --no-open
    """
    chosen = read_costs(costs, delay)
    to_caps(memory, in_microbatches=isinstance(chosen, ShareCosts))
    sizes = read_lengths(lengths, work)
    shape = ShapeOptions(ranks, microbatches, None, sizes.num_microbatches)
    num_ranks, num_microbatches = shape.of(None, chosen)
    shares = chosen if isinstance(chosen, ShareCosts) else chosen.shares(num_ranks)
    fields = fields_of(shares) | {"ranks": str(num_ranks), "microbatches": str(num_microbatches)}
    typed = {"lengths": lengths, "work": work, "recompute": "yes" if recompute else None}
    fields |= {name: text for name, text in typed.items() if text is not None}
    if left_out := [name for name in _NOT_COUNTED if any(getattr(shares, name) or ())]:
        typer.echo(
            f"The studio does not count {', '.join(left_out)}; penstock search does.", err=True
        )
    if chosen.time_unit == "s":
        fields["units"] = "seconds"
    if memory is not None:
        fields["memory"] = memory
        if memory[-1:].isalpha():  # Then the costs are in bytes and seconds.
            fields["units"] = "seconds and bytes"
    read_inputs(fields)  # Errors are reported here, not in the browser.
    # uvicorn and starlette take a while to load.
    from penstock.studio.serving import serve

    changed = {name: text for name, text in fields.items() if text != DEFAULTS[name]}
    serve(changed, port=port, is_opened=is_opened)

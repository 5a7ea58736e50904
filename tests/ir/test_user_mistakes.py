"""Values of the wrong kind are met with an error that says which kind is right."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import CostTable, Placement, Schedule, schedules, simulate
from penstock.errors import PipelineError
from penstock.ir import Forward
from penstock.schedules import Generator

ONE = Placement.linear(1)
GPIPE = schedules.get("GPipe")

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "list for a placement": (
        lambda: Schedule([[Forward(0, 0)]], [0], 1),
        "placement is [0]. Expected a Placement, such as Placement([0, 1]).",
    ),
    "one order for all": (
        lambda: Schedule([Forward(0, 0)], ONE, 1),
        "The orders hold 0F0, which is not an order. Give a list of actions for each rank.",
    ),
    "function that returns nothing": (
        lambda: Schedule(None, ONE, 1),
        "orders is None. Give an order for each rank; "
        "a function that makes them must yield or return them.",
    ),
    "rank that does not exist": (
        lambda: simulate(GPIPE(num_ranks=2, num_microbatches=1)).memory(2),
        "rank is 2. The schedule has ranks 0 to 1.",
    ),
    "stages that the placement does not have": (
        lambda: Generator(name="Mine", orders=GPIPE.orders, stages_per_rank=2)(
            num_ranks=3, num_microbatches=1
        ),
        "stages_per_rank is 2, but the placement of Mine has 3 stages on 3 ranks. "
        "Give the Generator a placement that fits, such as schedules.loop.",
    ),
    "part of a microbatch": (
        lambda: Schedule([[Forward(0, 0)]], ONE, 1.5),
        "num_microbatches is 1.5. Expected a whole number, at least 1.",
    ),
    "number for a placement": (
        lambda: Placement(3),
        "ranks is 3. Expected the rank of each stage, such as [0, 1]; "
        "for one stage per rank, use Placement.linear(3).",
    ),
    "part of a rank": (
        lambda: Placement([0, 1.0]),
        "Stage 1 is placed on rank 1.0. Ranks are whole numbers from 0.",
    ),
    "path for a text": (
        lambda: Schedule.from_csv(Path("schedule.csv")),
        f"The text is a {type(Path()).__name__}. Give the contents of the file: path.read_text().",
    ),
    "text for a number of ranks": (
        lambda: GPIPE(num_ranks="2", num_microbatches=4),
        "num_ranks is '2'. Expected a whole number.",
    ),
    "one time for all stages": (
        lambda: CostTable(forward=1.0, backward_input=[1], backward_weight=[1]),
        "forward is 1.0. Expected one number per stage; "
        "CostTable.uniform gives all stages the same.",
    ),
    "nothing for a time": (
        lambda: CostTable(forward=[None], backward_input=[1], backward_weight=[1]),
        "forward[0] is None. Expected a number.",
    ),
    "bytes and bandwidth of different units": (
        lambda: CostTable.uniform(3, message_bytes=1e300, bandwidth=1e-300),
        "message_bytes / bandwidth of edge 0 is infinite. "
        "Expected sizes and bandwidths in one unit.",
    ),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=list(MISTAKES))
def test_mistake_is_explained(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(PipelineError, match=f"^{re.escape(message)}$"):
        mistake()

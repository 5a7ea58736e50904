"""How much activation memory a rank holds along its order; time plays no part in it."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.ir import Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule
from penstock.ir.action import compute_parts
from penstock.ir.footprint import Footprint


class Held(NamedTuple):
    """Memory held while an action runs, and when it has ended."""

    during: float
    after: float


def held_along(schedule: Schedule, rank: int, footprint: Footprint) -> Iterator[Held]:
    """What `rank` holds at each position of its order.

    A forward allocates when it starts; a backward frees when it ends. Without any backward in the
    order, as in inference, nothing is kept for one and a forward frees what it allocated.
    """
    order = schedule.orders[rank]
    keeps = any(not isinstance(part, Forward) for action in order for part in compute_parts(action))
    held = 0.0
    for action in order:
        during = held
        for part in compute_parts(action):
            if isinstance(part, Forward):
                during += footprint.after_forward[part.stage]
        held = (during if keeps else held) - _freed(action, footprint)
        yield Held(during, held)


def _freed(action: Action, footprint: Footprint) -> float:
    freed = 0.0
    for part in compute_parts(action):
        match part:
            case Backward(stage=stage):
                freed += footprint.after_forward[stage]
            case BackwardInput(stage=stage):
                freed += footprint.after_forward[stage] - footprint.after_input[stage]
            case BackwardWeight(stage=stage):
                freed += footprint.after_input[stage]
    return freed

"""How much activation memory a rank holds along its order; time plays no part in it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isnan
from numbers import Real
from typing import Final, NamedTuple

from penstock.costs.footprint import Footprint
from penstock.errors import CostError
from penstock.ir import Backward, BackwardInput, Forward, Schedule
from penstock.ir.action import compute_parts

ROUNDING: Final = 1 + 1e-9  # Sums of the same numbers in another order may differ by this much.


class EvenFootprint(NamedTuple):
    """A footprint made of numbers alone."""

    after_forward: tuple[float, ...]
    after_input: tuple[float, ...]


def whole_shares(schedule: Schedule) -> EvenFootprint:
    """The footprint by which a microbatch holds 1 on all stages of a rank together."""
    ranks = schedule.placement.ranks
    num_held = Counter(ranks)
    share = tuple(1 / num_held[rank] for rank in ranks)
    return EvenFootprint(share, share)


class Held(NamedTuple):
    """Memory held while an action runs, and when it has ended."""

    during: float
    after: float


def check_stages(schedule: Schedule, footprint: Footprint) -> None:
    """Raises if the costs are not those of the schedule's stages."""
    num_stages = len(footprint.after_forward)
    if num_stages != schedule.num_stages:
        raise CostError(
            f"The costs are of {num_stages} stages, but the schedule has {schedule.num_stages}. "
            "Give costs for each stage."
        )


def cap_of_each_rank(
    name: str, memory: float | Iterable[float], num_ranks: int
) -> tuple[float, ...]:
    """What each rank may hold, given one number for all or one for each; `name` is for errors."""
    caps = tuple(memory) if isinstance(memory, Iterable) else (memory,) * num_ranks
    if len(caps) != num_ranks:
        raise CostError(
            f"{name} has {len(caps)} values, but there are {num_ranks} ranks. "
            "Give one for each rank, or one for all."
        )
    if any(not isinstance(cap, Real) or isnan(cap) for cap in caps):
        raise CostError(f"{name} is {memory}. Expected numbers, in the costs' unit.")
    return tuple(map(float, caps))


def held_along(schedule: Schedule, rank: int, footprint: Footprint) -> Iterator[Held]:
    """What `rank` holds at each position of its order.

    A forward allocates when it starts; a backward frees when it ends. Without any backward in the
    order, as in inference, nothing is kept for one and a forward frees what it allocated.
    """
    order = schedule.orders[rank]
    keeps = any(not isinstance(part, Forward) for action in order for part in compute_parts(action))
    after_forward, after_input = footprint.after_forward, footprint.after_input
    held = 0.0
    for action in order:
        allocated = freed = 0.0
        for part in compute_parts(action):
            if isinstance(part, Forward):
                allocated += after_forward[part.stage]
            elif isinstance(part, Backward):
                freed += after_forward[part.stage]
            elif isinstance(part, BackwardInput):
                freed += after_forward[part.stage] - after_input[part.stage]
            else:
                freed += after_input[part.stage]
        during = held + allocated
        held = during - freed if keeps else held
        held = 0.0 if abs(held) < 1e-12 * during else held  # What rounding leaves is nothing.
        yield Held(during, held)

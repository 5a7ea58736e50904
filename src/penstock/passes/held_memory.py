"""The memory that a rank holds along its order; times do not matter."""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isnan
from numbers import Real
from typing import Final, NamedTuple

from penstock.costs.footprint import Footprint
from penstock.errors import CostError
from penstock.ir import Backward, BackwardInput, Forward, Reshard, Schedule, Unshard
from penstock.ir.action import compute_parts

ROUNDING: Final = 1 + 1e-9  # Sums of the same numbers in another order may differ by this much.


class EvenFootprint(NamedTuple):
    """A footprint that is only numbers."""

    after_forward: tuple[float, ...]
    after_input: tuple[float, ...]
    gathered: tuple[float, ...]


def whole_shares(schedule: Schedule) -> EvenFootprint:
    """Return the footprint with which a microbatch holds 1 on all stages of a rank together."""
    ranks = schedule.placement.ranks
    num_held = Counter(ranks)
    share = tuple(1 / num_held[rank] for rank in ranks)
    return EvenFootprint(share, share, (0.0,) * len(ranks))


class Held(NamedTuple):
    """The memory held while an action runs, and after it has ended."""

    during: float
    after: float


def check_stages(schedule: Schedule, footprint: Footprint) -> None:
    """Raise an error if the costs are not for the schedule's stages."""
    num_stages = len(footprint.after_forward)
    if num_stages != schedule.num_stages:
        raise CostError(
            f"The costs are for {num_stages} stages, but the schedule has {schedule.num_stages}. "
            "Give costs for each stage."
        )


def cap_of_each_rank(
    name: str, memory: float | Iterable[float], num_ranks: int
) -> tuple[float, ...]:
    """Return the cap of each rank, given one for all or one for each; `name` is for errors."""
    caps = tuple(memory) if isinstance(memory, Iterable) else (memory,) * num_ranks
    if len(caps) != num_ranks:
        raise CostError(
            f"{name} has {len(caps)} values, but there are {num_ranks} ranks. "
            "Give one for each rank, or one for all."
        )
    if any(not isinstance(cap, Real) or isnan(cap) for cap in caps):
        raise CostError(f"{name} is {memory}. Expected numbers, in the costs' unit.")
    return tuple(map(float, caps))


class Change(NamedTuple):
    """The memory that an action allocates when it starts, and frees when it ends."""

    allocated: float
    freed: float


def held_along(schedule: Schedule, rank: int, footprint: Footprint) -> Iterator[Held]:
    """Yield the memory that `rank` holds at each position of its order."""
    held = 0.0
    for change in changes_along(schedule, rank, footprint):
        during = held + change.allocated
        held = round_off(during - change.freed, during)
        yield Held(during, held)


def changes_along(schedule: Schedule, rank: int, footprint: Footprint) -> Iterator[Change]:
    """Yield what each action of `rank` changes.

    A forward allocates when it starts; a backward frees when it ends. If the order has no backward,
    as in inference, a forward frees what it allocated. A gather allocates until its free.
    """
    order = schedule.orders[rank]
    keeps = any(not isinstance(part, Forward) for action in order for part in compute_parts(action))
    after_forward, after_input = footprint.after_forward, footprint.after_input
    for action in order:
        allocated = freed = 0.0
        if isinstance(action, Unshard):
            allocated = footprint.gathered[action.stage]
        elif isinstance(action, Reshard):
            freed = footprint.gathered[action.stage]
        for part in compute_parts(action):
            if isinstance(part, Forward):
                allocated += after_forward[part.stage]
                freed += 0.0 if keeps else after_forward[part.stage]
            elif isinstance(part, Backward):
                freed += after_forward[part.stage]
            elif isinstance(part, BackwardInput):
                freed += after_forward[part.stage] - after_input[part.stage]
            else:
                freed += after_input[part.stage]
        yield Change(allocated, freed)


def round_off(held: float, before: float) -> float:
    """Return the memory that is left of `before`; a rest from rounding counts as zero."""
    return 0.0 if abs(held) < 1e-12 * before else held

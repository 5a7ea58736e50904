"""The memory that a rank holds along its order; times do not matter."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from math import isnan
from numbers import Real
from typing import Final, NamedTuple

from penstock.costs.footprint import Footprint
from penstock.costs.microbatch_scales import check_microbatches
from penstock.errors import CostError
from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recompute,
    Reshard,
    Schedule,
    StageId,
    Unshard,
)
from penstock.ir.action import BACKWARD_TYPES, SingleCompute, compute_parts, recomputed_by

ROUNDING: Final = 1 + 1e-9  # Sums of the same numbers in another order may differ by this much.


class EvenFootprint(NamedTuple):
    """A footprint that is only numbers."""

    after_forward: tuple[float, ...]
    after_input: tuple[float, ...]
    during_forward: tuple[float, ...]
    during_input: tuple[float, ...]
    during_weight: tuple[float, ...]
    during_backward: tuple[float, ...]
    gathered: tuple[float, ...]
    after_dropping: tuple[float, ...]
    during_dropping: tuple[float, ...]
    during_recompute: tuple[float, ...]
    memory_scale: tuple[float, ...] = ()

    @property
    def num_microbatches(self) -> int | None:
        """See `Footprint`."""
        return len(self.memory_scale) or None


def whole_shares(schedule: Schedule) -> EvenFootprint:
    """Return the footprint with which a microbatch holds 1 on all stages of a rank together."""
    ranks = schedule.placement.ranks
    num_held = Counter(ranks)
    share = tuple(1 / num_held[rank] for rank in ranks)
    none = (0.0,) * len(ranks)
    return EvenFootprint(share, share, *(none,) * 8)


class Held(NamedTuple):
    """The most memory held while an action runs, and what is held after it has ended."""

    during: float
    after: float


def check_stages(schedule: Schedule, footprint: Footprint) -> None:
    """Raise an error if the costs are not for the schedule's stages and microbatches."""
    num_stages = len(footprint.after_forward)
    if num_stages != schedule.num_stages:
        raise CostError(
            f"The costs are for {num_stages} stages, but the schedule has {schedule.num_stages}. "
            "Give costs for each stage."
        )
    check_microbatches(footprint.num_microbatches, schedule.num_microbatches)


def cap_of_each_rank(
    name: str, memory: float | Iterable[float], num_ranks: int
) -> tuple[float, ...]:
    """Return the cap of each rank, given one for all or one for each; `name` is for errors."""
    caps: tuple[object, ...]
    if isinstance(memory, Iterable) and getattr(memory, "ndim", 1) > 0:  # Not an array of one.
        caps = tuple(memory)
    else:
        caps = (memory,) * num_ranks
    if len(caps) != num_ranks:
        raise CostError(
            f"{name} has {len(caps)} values, but there are {num_ranks} ranks. "
            "Give one for each rank, or one for all."
        )
    numbers = [cap for cap in caps if isinstance(cap, Real) and not isnan(cap)]
    if len(numbers) < len(caps):
        raise CostError(f"{name} is {memory}. Expected numbers, in the costs' unit.")
    return tuple(map(float, numbers))


class Change(NamedTuple):
    """What an action does to the memory of its rank."""

    rise: float
    """The most that it needs at any moment beyond what was held before it."""
    net: float
    """What it leaves held, less what was held before it."""

    def times(self, scale: float) -> "Change":
        """Return the change that an action of a larger or smaller microbatch makes."""
        return Change(self.rise * scale, self.net * scale)


def stage_changes(footprint: Footprint, stage: StageId) -> dict[type[SingleCompute], Change]:
    """Return what each kind of action of a stage does to memory, before `memory_scale`."""
    kept, left = footprint.after_forward[stage], footprint.after_input[stage]
    again = kept - footprint.after_dropping[stage]
    return {
        Forward: Change(max(kept, footprint.during_forward[stage]), kept),
        BackwardInput: Change(footprint.during_input[stage], left - kept),
        BackwardWeight: Change(footprint.during_weight[stage], -left),
        Backward: Change(footprint.during_backward[stage], -kept),
        Recompute: Change(max(again, footprint.during_recompute[stage]), again),
    }


def dropping_change(footprint: Footprint, stage: StageId) -> Change:
    """Return what a forward does to memory if it is recomputed, so that it drops its values."""
    kept = footprint.after_dropping[stage]
    return Change(max(kept, footprint.during_dropping[stage]), kept)


def held_along(schedule: Schedule, rank: int, footprint: Footprint) -> Iterator[Held]:
    """Yield the memory that `rank` holds at each position of its order."""
    held = 0.0
    for change in changes_along(schedule, rank, footprint):
        during = held + change.rise
        held = round_off(held + change.net, during)
        yield Held(during, held)


def changes_along(schedule: Schedule, rank: int, footprint: Footprint) -> Iterator[Change]:
    """Yield what each action of `rank` changes.

    What a backward frees is held until its end. If the order has no backward, as in inference, a
    forward frees what it allocated; one that is recomputed keeps its inputs. A gather allocates
    until its free.
    """
    order = schedule.orders[rank]
    keeps = any(
        isinstance(part, BACKWARD_TYPES) for action in order for part in compute_parts(action)
    )
    recomputed = recomputed_by(order)
    changes_of = cache(lambda stage: stage_changes(footprint, stage))
    scales = footprint.memory_scale

    def change_of(part: SingleCompute) -> Change:
        change: Change = changes_of(part.stage)[type(part)]
        if isinstance(part, Forward) and (part.stage, part.mb) in recomputed:
            change = dropping_change(footprint, part.stage)
        if scales:
            change = change.times(scales[part.mb])
        return change if keeps else Change(change.rise, 0.0)

    for action in order:
        if isinstance(action, Unshard):
            yield Change(footprint.gathered[action.stage], footprint.gathered[action.stage])
        elif isinstance(action, Reshard):
            yield Change(0.0, -footprint.gathered[action.stage])
        else:
            yield _one_after_another(map(change_of, compute_parts(action)))


def _one_after_another(changes: Iterable[Change]) -> Change:
    """Return the change of the parts of an action; what they free is held until its end."""
    rise = allocated = net = 0.0
    for change in changes:
        rise = max(rise, allocated + change.rise)
        allocated += max(0.0, change.net)
        net += change.net
    return Change(rise, net)


def round_off(held: float, before: float) -> float:
    """Return the memory that is left of `before`; a rest from rounding counts as zero."""
    return 0.0 if abs(held) < 1e-12 * before else held

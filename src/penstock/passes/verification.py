"""Prove that a schedule can run, before it does: complete, in order, free of deadlock."""

from collections.abc import Iterable, Sequence

from penstock.costs.footprint import Footprint
from penstock.errors import ScheduleError
from penstock.ir import (
    Backward,
    BackwardInput,
    Forward,
    Overlap,
    Rank,
    Recompute,
    Schedule,
    Send,
)
from penstock.ir.action import COMM_TYPES, SHARDING_TYPES, Comm, Sharding, SingleCompute, parts
from penstock.ir.excerpts import error_at
from penstock.ir.walking import walk
from penstock.passes.held_memory import (
    ROUNDING,
    cap_of_each_rank,
    check_stages,
    held_along,
    whole_shares,
)
from penstock.passes.local_proof import find_unproved, has_stamps
from penstock.passes.message_rules import check_comms
from penstock.passes.sharding_rules import check_sharding


def verify(
    schedule: Schedule,
    *,
    rank: Rank | None = None,
    costs: Footprint | None = None,
    memory: float | Iterable[float] | None = None,
) -> None:
    """Raise a ScheduleError at the first rule that `schedule` breaks; time linear in its actions.

    With `rank`, only the order of that rank is checked, against those of the ranks that it
    exchanges messages with; if each rank checks its own, the whole schedule is checked. That takes
    a schedule with stamps, such as all registered algorithms make; others are checked as a whole.

    1. Every action is on the rank of its stage, and occurs once.
    2. I or B comes after F, and W after I; nothing is missing. For inference, a schedule may have
       no backwards at all. R comes after F and before I or B, or not at all.
    3. If there are sends or receives, each message between ranks has a send, after the action that
       makes it. If there are receives, each message has one, before the action that needs it, and
       both ends of a channel have the same order.
    4. Stages that are gathered and freed are gathered at each of their F, B and I. No gather is of
       a gathered stage, and no free of a freed one. The gradients of a stage are reduced at most
       once, after its last B or W.
    5. No ranks wait for each other in a circle.
    6. No rank holds more than `memory` (one cap for all, or one for each) by the memory of `costs`;
       without `costs` the unit is a microbatch on all stages of a rank.
    """
    if rank is not None and rank not in range(schedule.num_ranks):
        raise ScheduleError(
            f"rank is {rank!r}. Expected a rank of the schedule: 0 to {schedule.num_ranks - 1}."
        )
    ranks: Sequence[Rank] = range(schedule.num_ranks) if rank is None else [rank]
    if rank is not None and has_stamps(schedule):
        _check_part(schedule, rank)
    else:
        check_orders(schedule)
        for _ in walk(schedule):
            pass
    if costs is not None:
        check_stages(schedule, costs)
    if memory is not None:
        _check_memory(schedule, costs, memory, ranks)


def check_orders(schedule: Schedule) -> None:
    """Check rules 1 to 4, which do not need a walk through all ranks."""
    _check_actions(schedule, range(schedule.num_ranks))
    if schedule.has_comms:
        check_comms(schedule)
    if schedule.has_sharding:
        check_sharding(schedule)


def _check_part(schedule: Schedule, rank: Rank) -> None:
    """Check all rules for one rank of a schedule with stamps, which has compute actions only."""
    _check_actions(schedule, [rank])
    fault = find_unproved(schedule, rank)
    if fault is not None:
        verify(schedule)  # It shows the circle, if there is one.
        raise fault


class _Seen:
    """The computes seen so far, as stage * num_microbatches + mb; a B counts as both halves."""

    def __init__(self) -> None:
        self.forwards: set[int] = set()
        self.inputs: set[int] = set()
        self.weights: set[int] = set()
        self.recomputed: set[int] = set()


def _check_actions(schedule: Schedule, ranks: Sequence[Rank]) -> None:
    seen = _Seen()
    for rank in ranks:
        for position, action in enumerate(schedule.orders[rank]):
            if isinstance(action, Overlap) and action.forward.mb == action.backward.mb:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} overlaps a forward and a backward of microbatch {action.forward.mb}",
                    "The backward needs that forward to be done. Overlap two microbatches.",
                )
            for part in parts(action):
                if (fault := _find_fault(schedule, rank, part, seen)) is not None:
                    raise error_at(schedule.orders, rank, position, *fault)
    _check_complete(schedule, ranks, seen)


def _find_fault(
    schedule: Schedule, rank: Rank, part: SingleCompute | Comm | Sharding, seen: _Seen
) -> tuple[str, str] | None:
    """Return what is wrong with `part` after those seen, and the rule; or add it to those seen."""
    stage = part.stage
    if not 0 <= stage < schedule.num_stages:
        return (
            f"{part} is of stage {stage}, which does not exist",
            f"The placement has stages 0 to {schedule.num_stages - 1}.",
        )
    holder = schedule.placement.ranks[stage]
    if holder != rank:
        return (
            f"{part} is of stage {stage}, which is on rank {holder}",
            "An action must be on the rank that holds its stage. Move it, or change the placement.",
        )
    if isinstance(part, SHARDING_TYPES):
        return None
    mb = part.mb
    if not 0 <= mb < schedule.num_microbatches:
        return (
            f"{part} is of microbatch {mb}, which does not exist",
            f"The schedule has microbatches 0 to {schedule.num_microbatches - 1}.",
        )
    if isinstance(part, COMM_TYPES):
        end = part.message.taker if isinstance(part, Send) else part.message.maker
        if part.message.skip and not 0 <= end < schedule.num_stages:
            return (
                f"{part} has its other end at stage {end}, which does not exist",
                f"The placement has stages 0 to {schedule.num_stages - 1}.",
            )
        return None
    key = stage * schedule.num_microbatches + mb
    done, needed = _does_and_needs(part, seen)
    for keys in done:
        if key in keys:
            return (
                f"{part} repeats work that is already done",
                "Each forward, input backward and weight backward must occur once; "
                "a full backward counts as both halves. Remove one.",
            )
    if needed is not None and key not in needed:
        kind, letter = ("forward", "F") if needed is seen.forwards else ("input backward", "I")
        return (
            f"{part} runs before {stage}{letter}{mb}",
            f"It must follow the {kind} of the same stage and microbatch. Move it later.",
        )
    if isinstance(part, Recompute) and key in seen.inputs:
        return (
            f"{part} runs after the backward that needs it",
            f"It must come before {stage}I{mb} or {stage}B{mb}. Move it earlier, or remove it.",
        )
    for keys in done:
        keys.add(key)
    return None


def _does_and_needs(
    part: SingleCompute, seen: _Seen
) -> tuple[tuple[set[int], ...], set[int] | None]:
    """Return the sets that `part` belongs to, and the set that it must follow."""
    if isinstance(part, Forward):
        return (seen.forwards,), None
    if isinstance(part, Backward):
        return (seen.inputs, seen.weights), seen.forwards
    if isinstance(part, BackwardInput):
        return (seen.inputs,), seen.forwards
    if isinstance(part, Recompute):
        return (seen.recomputed,), seen.forwards
    return (seen.weights,), seen.inputs


def _check_complete(schedule: Schedule, ranks: Sequence[Rank], seen: _Seen) -> None:
    kinds = [(seen.forwards, "F"), (seen.inputs, "I"), (seen.weights, "W")]
    if not (seen.inputs or seen.weights or seen.recomputed):
        kinds = kinds[:1]  # Inference.
    m = schedule.num_microbatches
    stages = [stage for stage, rank in enumerate(schedule.placement.ranks) if rank in ranks]
    for keys, kind in kinds:
        if len(keys) < len(stages) * m:
            every = (stage * m + mb for stage in stages for mb in range(m))
            missing = next(key for key in every if key not in keys)
            stage, mb = divmod(missing, m)
            rank = schedule.placement.ranks[stage]
            name = f"{stage}{kind}{mb}"
            if kind == "I" and missing not in seen.weights:
                name = f"{stage}B{mb}, or {stage}I{mb} and {stage}W{mb},"
            raise error_at(
                schedule.orders,
                rank,
                len(schedule.orders[rank]),
                f"{name} is missing",
                f"Every stage needs a forward for each of the {m} "
                "microbatches and, if the schedule has backwards, B, or I and W. Add it.",
            )


def _check_memory(
    schedule: Schedule,
    costs: Footprint | None,
    memory: float | Iterable[float],
    ranks: Sequence[Rank],
) -> None:
    if costs is None:
        costs = whole_shares(schedule)
    caps = cap_of_each_rank("memory", memory, schedule.num_ranks)
    for rank in ranks:
        for position, held in enumerate(held_along(schedule, rank, costs)):
            if held.during > caps[rank] * ROUNDING:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"the rank holds {held.during:g}, but its memory is {caps[rank]:g}",
                    "Let fewer forwards run ahead, raise memory, "
                    "or use a schedule that holds less, such as V-Half or V-Min.",
                )

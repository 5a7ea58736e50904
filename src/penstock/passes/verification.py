"""Proves that a schedule can be run, before anything is: complete, in order, free of deadlock."""

from collections.abc import Iterable

from penstock.costs.footprint import Footprint
from penstock.ir import (
    Backward,
    BackwardInput,
    Forward,
    Overlap,
    Rank,
    Schedule,
    Send,
)
from penstock.ir.action import COMM_TYPES, Comm, SingleCompute, parts
from penstock.ir.excerpts import error_at
from penstock.ir.walking import walk
from penstock.passes.held_memory import (
    ROUNDING,
    cap_of_each_rank,
    check_stages,
    held_along,
    whole_shares,
)
from penstock.passes.message_rules import check_comms


def verify(
    schedule: Schedule,
    *,
    costs: Footprint | None = None,
    memory: float | Iterable[float] | None = None,
) -> None:
    """Raises a ScheduleError at the first rule that `schedule` breaks; time linear in its actions.

    1. Every action is on the rank of its stage, and there once.
    2. I or B comes after F, and W after I; nothing is missing. A schedule may do without any
       backward, for inference.
    3. Sends and receives, if there are any, are there for each message between ranks, on the right
       side of the action they serve, and in one order at both ends of a channel.
    4. No ranks wait for each other in a circle.
    5. No rank holds more than `memory` (one for all, or one for each) by the memory of `costs`;
       without `costs` the unit is a microbatch on all stages of a rank.
    """
    check_orders(schedule)
    for _ in walk(schedule):
        pass
    if costs is not None:
        check_stages(schedule, costs)
    if memory is not None:
        _check_memory(schedule, costs, memory)


def check_orders(schedule: Schedule) -> None:
    """Rules 1 to 3: all that can be said without going from rank to rank."""
    _check_actions(schedule)
    if schedule.has_comms:
        check_comms(schedule)


class _Seen:
    """Which forwards and halves of backwards have come up, as stage * num_microbatches + mb."""

    def __init__(self) -> None:
        self.forwards: set[int] = set()
        self.inputs: set[int] = set()
        self.weights: set[int] = set()


def _check_actions(schedule: Schedule) -> None:
    seen = _Seen()
    for rank, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            if isinstance(action, Overlap) and action.forward.mb == action.backward.mb:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} overlaps a forward and a backward of microbatch {action.forward.mb}",
                    "The backward needs that forward to be over. Overlap two microbatches.",
                )
            for part in parts(action):
                if (fault := _find_fault(schedule, rank, part, seen)) is not None:
                    raise error_at(schedule.orders, rank, position, *fault)
    _check_complete(schedule, seen)


def _find_fault(
    schedule: Schedule, rank: Rank, part: SingleCompute | Comm, seen: _Seen
) -> tuple[str, str] | None:
    """What is wrong with `part` after what has been seen, and the rule; adds it to the seen."""
    stage, mb = part.stage, part.mb
    if not 0 <= stage < schedule.num_stages:
        return (
            f"{part} is of stage {stage}, which does not exist",
            f"The placement has stages 0 to {schedule.num_stages - 1}.",
        )
    if not 0 <= mb < schedule.num_microbatches:
        return (
            f"{part} is of microbatch {mb}, which does not exist",
            f"The schedule has microbatches 0 to {schedule.num_microbatches - 1}.",
        )
    holder = schedule.placement.ranks[stage]
    if holder != rank:
        return (
            f"{part} is of stage {stage}, which is on rank {holder}",
            "An action must be on the rank that holds its stage. Move it, or change the placement.",
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
                f"{part} repeats what was done before",
                "Each forward, input backward and weight backward must be there once; "
                "a full backward counts as both halves. Remove one.",
            )
    if needed is not None and key not in needed:
        kind, letter = ("forward", "F") if needed is seen.forwards else ("input backward", "I")
        return (
            f"{part} runs before {stage}{letter}{mb}",
            f"It must follow the {kind} of the same stage and microbatch. Move it behind.",
        )
    for keys in done:
        keys.add(key)
    return None


def _does_and_needs(
    part: SingleCompute, seen: _Seen
) -> tuple[tuple[set[int], ...], set[int] | None]:
    """What `part` does, and what must have been done before."""
    if isinstance(part, Forward):
        return (seen.forwards,), None
    if isinstance(part, Backward):
        return (seen.inputs, seen.weights), seen.forwards
    if isinstance(part, BackwardInput):
        return (seen.inputs,), seen.forwards
    return (seen.weights,), seen.inputs


def _check_complete(schedule: Schedule, seen: _Seen) -> None:
    kinds = [(seen.forwards, "F"), (seen.inputs, "I"), (seen.weights, "W")]
    if not seen.inputs and not seen.weights:
        kinds = kinds[:1]  # Inference.
    expected = schedule.num_stages * schedule.num_microbatches
    for keys, kind in kinds:
        if len(keys) < expected:
            missing = next(key for key in range(expected) if key not in keys)
            stage, mb = divmod(missing, schedule.num_microbatches)
            rank = schedule.placement.ranks[stage]
            name = f"{stage}{kind}{mb}"
            if kind == "I" and missing not in seen.weights:
                name = f"{stage}B{mb}, or {stage}I{mb} and {stage}W{mb},"
            raise error_at(
                schedule.orders,
                rank,
                len(schedule.orders[rank]),
                f"{name} is missing",
                f"Every stage needs a forward of each of the {schedule.num_microbatches} "
                "microbatches and, if there are backwards at all, B, or I and W. Add it.",
            )


def _check_memory(
    schedule: Schedule, costs: Footprint | None, memory: float | Iterable[float]
) -> None:
    if costs is None:
        costs = whole_shares(schedule)
    caps = cap_of_each_rank("memory", memory, schedule.num_ranks)
    for rank, cap in enumerate(caps):
        for position, held in enumerate(held_along(schedule, rank, costs)):
            if held.during > cap * ROUNDING:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"the rank holds {held.during:g}, but its memory is {cap:g}",
                    "Let fewer forwards run ahead, raise memory, "
                    "or use a schedule that holds less, such as V-Half or V-Min.",
                )

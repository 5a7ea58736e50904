"""Proves that a schedule can be run, before anything is: complete, in order, free of deadlock."""

from collections.abc import Sequence
from typing import assert_never

from penstock.errors import CostError
from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Rank,
    Schedule,
)
from penstock.ir.action import SingleCompute, compute_parts
from penstock.ir.excerpt import error_at
from penstock.ir.footprint import Footprint
from penstock.ir.walk import walk
from penstock.passes.memory import held_along
from penstock.passes.verify_comms import check_comms

_SLACK = 1 + 1e-9  # Sums of the same numbers in another order may differ by rounding.


def verify(
    schedule: Schedule,
    *,
    costs: Footprint | None = None,
    memory_cap: float | Sequence[float] | None = None,
) -> None:
    """Raises a ScheduleError at the first rule that `schedule` breaks; time linear in its actions.

    1. Every action is on the rank of its stage, and there once.
    2. I or B comes after F, and W after I; nothing is missing. A schedule may do without any
       backward, for inference.
    3. Sends and receives, if there are any, are there for each message between ranks, on the right
       side of the action they serve, and in one order at both ends of a channel.
    4. No ranks wait for each other in a circle.
    5. No rank holds more than `memory_cap` (one for all, or one for each) by the memory of `costs`.
    """
    _check_computes(schedule)
    if schedule.has_comms:
        check_comms(schedule)
    for _ in walk(schedule):
        pass
    if memory_cap is not None:
        _check_memory(schedule, costs, memory_cap)


class _Seen:
    """Which forwards and halves of backwards have come up, as stage * num_microbatches + mb."""

    def __init__(self) -> None:
        self.forwards: set[int] = set()
        self.inputs: set[int] = set()
        self.weights: set[int] = set()


def _check_computes(schedule: Schedule) -> None:
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
            for part in compute_parts(action):
                _check_place(schedule, rank, position, part)
                _check_turn(schedule, rank, position, part, seen)
    _check_complete(schedule, seen)


def _check_place(schedule: Schedule, rank: Rank, position: int, part: SingleCompute) -> None:
    if not 0 <= part.stage < schedule.num_stages:
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{part} is of stage {part.stage}, which does not exist",
            f"The placement has stages 0 to {schedule.num_stages - 1}.",
        )
    if not 0 <= part.mb < schedule.num_microbatches:
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{part} is of microbatch {part.mb}, which does not exist",
            f"The schedule has microbatches 0 to {schedule.num_microbatches - 1}.",
        )
    if schedule.placement.ranks[part.stage] != rank:
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{part} is of stage {part.stage}, "
            f"which is on rank {schedule.placement.ranks[part.stage]}",
            "An action must be on the rank that holds its stage. Move it, or change the placement.",
        )


def _check_turn(
    schedule: Schedule, rank: Rank, position: int, part: SingleCompute, seen: _Seen
) -> None:
    key = part.stage * schedule.num_microbatches + part.mb
    done, needed = _turn(part, seen)
    if any(key in keys for keys in done):
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{part} repeats what was done before",
            "Each forward, input backward and weight backward must be there once; "
            "a full backward counts as both halves. Remove one.",
        )
    if needed is not None and key not in needed:
        kind, letter = ("forward", "F") if needed is seen.forwards else ("input backward", "I")
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{part} runs before {part.stage}{letter}{part.mb}",
            f"It must follow the {kind} of the same stage and microbatch. Move it behind.",
        )
    for keys in done:
        keys.add(key)


def _turn(part: SingleCompute, seen: _Seen) -> tuple[tuple[set[int], ...], set[int] | None]:
    """What `part` does, and what must have been done before."""
    match part:
        case Forward():
            return (seen.forwards,), None
        case Backward():
            return (seen.inputs, seen.weights), seen.forwards
        case BackwardInput():
            return (seen.inputs,), seen.forwards
        case BackwardWeight():
            return (seen.weights,), seen.inputs
        case _:
            assert_never(part)


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
            raise error_at(
                schedule.orders,
                rank,
                len(schedule.orders[rank]),
                f"{stage}{kind}{mb} is missing",
                f"Every stage needs a forward of each of the {schedule.num_microbatches} "
                "microbatches and, if there are backwards at all, B, or I and W. Add it.",
            )


def _check_memory(
    schedule: Schedule, costs: Footprint | None, memory_cap: float | Sequence[float]
) -> None:
    if costs is None:
        raise CostError(
            "memory_cap is given without costs. "
            "Give costs too, which say how much memory each stage takes."
        )
    caps = [memory_cap] * schedule.num_ranks if isinstance(memory_cap, int | float) else memory_cap
    if len(caps) != schedule.num_ranks:
        raise CostError(
            f"memory_cap has {len(caps)} values, but there are {schedule.num_ranks} ranks. "
            "Give one for each rank, or one for all."
        )
    if len(costs.after_forward) != schedule.num_stages:
        raise CostError(
            f"The costs are of {len(costs.after_forward)} stages, "
            f"but the schedule has {schedule.num_stages}. Give costs for each stage."
        )
    for rank, cap in enumerate(caps):
        for position, held in enumerate(held_along(schedule, rank, costs)):
            if held.during > cap * _SLACK:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"the rank holds {held.during:g}, but its memory_cap is {cap:g}",
                    "Let fewer forwards run ahead, raise memory_cap, "
                    "or use a schedule that holds less, such as V-Half or V-Min.",
                )

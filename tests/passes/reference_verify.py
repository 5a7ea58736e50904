"""A slow and obvious second opinion on schedules: it shares no code with `penstock.passes`.

Every rule is checked on its own, with lists, over the whole schedule.
"""

import graphlib
from collections import Counter, defaultdict
from typing import NamedTuple

from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Recv,
    ReduceGrads,
    Reshard,
    Schedule,
    Send,
    Unshard,
)


class Deed(NamedTuple):
    """One thing that an action does: F, I or W, or a send or receive of what F or I makes.

    What an action does for a whole stage, a gather, free or reduction, has microbatch 0.
    """

    kind: str
    stage: int
    mb: int


class Node(NamedTuple):
    """An action by its place."""

    rank: int
    position: int


Deeds = dict[Deed, list[Node]]

_KINDS = {
    Forward: ["F"],
    Backward: ["I", "W"],
    BackwardInput: ["I"],
    BackwardWeight: ["W"],
}


def find_fault(schedule: Schedule) -> str | None:
    """The first rule that the schedule breaks, or None if it can be run."""
    deeds = _find_deeds(schedule)
    for rule in (
        _misplaced,
        _miscounted,
        _out_of_order,
        _communication_incomplete,
        _communication_out_of_order,
        _channel_out_of_order,
        _not_gathered,
        _misreduced,
        _deadlock,
    ):
        if rule(schedule, deeds):
            return rule.__name__.strip("_").replace("_", " ")
    return None


def _deeds_of(action: Action) -> list[Deed]:
    if isinstance(action, Overlap):
        return _deeds_of(action.forward) + _deeds_of(action.backward)
    if isinstance(action, Send | Recv):
        verb = "send" if isinstance(action, Send) else "recv"
        kind = "I" if action.message.is_gradient else "F"
        return [Deed(f"{verb} {kind}", action.stage, action.mb)]
    if isinstance(action, Unshard | Reshard | ReduceGrads):
        return [Deed(type(action).__name__, action.stage, 0)]
    return [Deed(kind, action.stage, action.mb) for kind in _KINDS[type(action)]]


def _find_deeds(schedule: Schedule) -> Deeds:
    deeds: Deeds = defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            for deed in _deeds_of(action):
                deeds[deed].append(Node(rank, position))
    return deeds


def _misplaced(schedule: Schedule, deeds: Deeds) -> bool:
    ranks = dict(enumerate(schedule.placement.ranks))
    return any(
        ranks.get(deed.stage) != node.rank or deed.mb not in range(schedule.num_microbatches)
        for deed, nodes in deeds.items()
        for node in nodes
    )


def _all_of(kind: str, schedule: Schedule) -> list[Deed]:
    return [
        Deed(kind, stage, mb)
        for stage in range(schedule.num_stages)
        for mb in range(schedule.num_microbatches)
    ]


def _has_backwards(deeds: Deeds) -> bool:
    return any(deed.kind in ("I", "W") for deed in deeds)


def _miscounted(schedule: Schedule, deeds: Deeds) -> bool:
    kinds = ["F", "I", "W"] if _has_backwards(deeds) else ["F"]
    expected = [deed for kind in kinds for deed in _all_of(kind, schedule)]
    found = [deed for deed, nodes in deeds.items() for _ in nodes if deed.kind in ("F", "I", "W")]
    return Counter(expected) != Counter(found)


def _out_of_order(schedule: Schedule, deeds: Deeds) -> bool:
    for _, stage, mb in _all_of("F", schedule):
        if _has_backwards(deeds):
            [forward] = deeds[Deed("F", stage, mb)]
            [half] = deeds[Deed("I", stage, mb)]
            [weight] = deeds[Deed("W", stage, mb)]
            if not forward.position < half.position <= weight.position:
                return True
    return False


class HandOver(NamedTuple):
    """What one stage makes and a neighbour on another rank needs."""

    maker: Deed
    user: Deed
    send: Deed
    recv: Deed


def _hand_overs(schedule: Schedule, deeds: Deeds) -> list[HandOver]:
    """All that passes between neighbouring stages, on one rank or not."""
    found = []
    for stage in range(schedule.num_stages - 1):
        for mb in range(schedule.num_microbatches):
            for kind, maker, user in (("F", stage, stage + 1), ("I", stage + 1, stage)):
                if kind == "F" or _has_backwards(deeds):
                    found.append(
                        HandOver(
                            Deed(kind, maker, mb),
                            Deed(kind, user, mb),
                            Deed(f"send {kind}", maker, mb),
                            Deed(f"recv {kind}", user, mb),
                        )
                    )
    return found


def _messages(schedule: Schedule, deeds: Deeds) -> list[HandOver]:
    ranks = schedule.placement.ranks
    return [
        message
        for message in _hand_overs(schedule, deeds)
        if ranks[message.maker.stage] != ranks[message.user.stage]
    ]


def _has_comms(deeds: Deeds) -> bool:
    return any(" " in deed.kind for deed in deeds)


def _has_receives(deeds: Deeds) -> bool:
    return any(deed.kind.startswith("recv") for deed in deeds)


def _communication_incomplete(schedule: Schedule, deeds: Deeds) -> bool:
    if not _has_comms(deeds):
        return False
    messages = _messages(schedule, deeds)
    expected = [message.send for message in messages]
    if _has_receives(deeds):
        expected += [message.recv for message in messages]
    found = [deed for deed, nodes in deeds.items() for _ in nodes if " " in deed.kind]
    return Counter(expected) != Counter(found)


def _communication_out_of_order(schedule: Schedule, deeds: Deeds) -> bool:
    if not _has_comms(deeds):
        return False
    for maker, user, send, recv in _messages(schedule, deeds):
        if not deeds[maker][0].position < deeds[send][0].position:
            return True
        if _has_receives(deeds) and not deeds[recv][0].position < deeds[user][0].position:
            return True
    return False


def _channel_out_of_order(schedule: Schedule, deeds: Deeds) -> bool:
    if not _has_receives(deeds):
        return False
    channels = defaultdict(list)
    for message in _messages(schedule, deeds):
        send, recv = deeds[message.send][0], deeds[message.recv][0]
        channels[send.rank, recv.rank].append((send.position, recv.position))
    return any(
        [recv for _, recv in sorted(pairs)] != sorted(recv for _, recv in pairs)
        for pairs in channels.values()
    )


def _positions(kinds: str, stage: int, deeds: Deeds) -> list[int]:
    return sorted(
        node.position
        for deed, nodes in deeds.items()
        for node in nodes
        if deed.kind in kinds.split() and deed.stage == stage
    )


def _not_gathered(schedule: Schedule, deeds: Deeds) -> bool:
    for stage in range(schedule.num_stages):
        gathers = _positions("Unshard", stage, deeds)
        frees = _positions("Reshard", stage, deeds)
        if not gathers and not frees:
            continue
        # Gathers and frees take turns, beginning with a gather.
        turns = sorted([(place, "gather") for place in gathers] + [(p, "free") for p in frees])
        if any(kind != ("gather", "free")[n % 2] for n, (_, kind) in enumerate(turns)):
            return True
        for place in _positions("F I", stage, deeds):
            before = sum(gather < place for gather in gathers)
            if before != sum(free < place for free in frees) + 1:
                return True
    return False


def _misreduced(schedule: Schedule, deeds: Deeds) -> bool:
    for stage in range(schedule.num_stages):
        reductions = _positions("ReduceGrads", stage, deeds)
        weights = _positions("W", stage, deeds)
        if len(reductions) > 1 or (reductions and not weights):
            return True
        if reductions and reductions[0] < weights[-1]:
            return True
    return False


def _deadlock(schedule: Schedule, deeds: Deeds) -> bool:
    """Whether the graph of all actions and all that waits for them has a cycle.

    A receive is only posted, so what waits for the send is the action that uses the message.
    """
    waits_for: dict[Node, list[Node]] = {}
    for rank, order in enumerate(schedule.orders):
        for position in range(len(order)):
            before = [Node(rank, position - 1)] if position else []
            waits_for[Node(rank, position)] = before
    messages = _messages(schedule, deeds) if _has_comms(deeds) else []
    for hand_over in _hand_overs(schedule, deeds):
        deliverer = hand_over.send if hand_over in messages else hand_over.maker
        waits_for[deeds[hand_over.user][0]].append(deeds[deliverer][0])
    try:
        graphlib.TopologicalSorter(waits_for).prepare()
    except graphlib.CycleError:
        return True
    return False

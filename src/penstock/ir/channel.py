"""Which messages pass between ranks, and on which channel.

A channel joins an ordered pair of ranks; its messages stay in order.
"""

from typing import NamedTuple, assert_never

from penstock.ir.action import (
    Action,
    Backward,
    BackwardInput,
    Comm,
    Forward,
    Rank,
    Recv,
    RecvActivation,
    RecvGradient,
    Send,
    SendActivation,
    SendGradient,
    compute_parts,
)
from penstock.ir.placement import Placement


class Channel(NamedTuple):
    """From one rank to another."""

    sender: Rank
    receiver: Rank


def channel_of(comm: Comm, placement: Placement) -> Channel:
    """The channel that a send or receive uses."""
    ranks = placement.ranks
    match comm:
        case SendActivation(stage=stage):
            return Channel(ranks[stage], ranks[stage + 1])
        case RecvActivation(stage=stage):
            return Channel(ranks[stage - 1], ranks[stage])
        case SendGradient(stage=stage):
            return Channel(ranks[stage], ranks[stage - 1])
        case RecvGradient(stage=stage):
            return Channel(ranks[stage + 1], ranks[stage])
        case _:
            assert_never(comm)


def receive_of(send: Send) -> Recv:
    """The receive at the other end.

    >>> receive_of(SendGradient(3, 0))
    RecvGradient(stage=2, mb=0)
    """
    if isinstance(send, SendActivation):
        return RecvActivation(send.stage + 1, send.mb)
    return RecvGradient(send.stage - 1, send.mb)


def sends_after(action: Action, placement: Placement) -> list[Send]:
    """What another rank needs of what `action` makes."""
    ranks = placement.ranks
    sends: list[Send] = []
    for part in compute_parts(action):
        stage = part.stage
        match part:
            case Forward() if stage + 1 < len(ranks) and ranks[stage] != ranks[stage + 1]:
                sends.append(SendActivation(stage, part.mb))
            case Backward() | BackwardInput() if stage > 0 and ranks[stage] != ranks[stage - 1]:
                sends.append(SendGradient(stage, part.mb))
    return sends


def receives_before(action: Action, placement: Placement) -> list[Recv]:
    """What `action` needs of what another rank makes."""
    ranks = placement.ranks
    last = len(ranks) - 1
    receives: list[Recv] = []
    for part in compute_parts(action):
        stage = part.stage
        match part:
            case Forward() if stage > 0 and ranks[stage] != ranks[stage - 1]:
                receives.append(RecvActivation(stage, part.mb))
            case Backward() | BackwardInput() if stage < last and ranks[stage] != ranks[stage + 1]:
                receives.append(RecvGradient(stage, part.mb))
    return receives

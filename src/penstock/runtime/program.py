"""What one rank has to do in a step, worked out from the schedule before anything runs.

A schedule says in which order a rank acts. Its program adds what can be known ahead: which messages
each action needs and makes, in which order those of each channel come, which backward is split,
which weight gradient is a stage's last, and when a message that was sent has surely been received.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Message,
    Rank,
    Schedule,
    Send,
    Skip,
    StageId,
)
from penstock.ir.action import SingleCompute, compute_parts
from penstock.ir.dataflow import Dataflow, sent_by
from penstock.ir.message import Channel
from penstock.passes import add_sends


@dataclass(frozen=True, slots=True)
class Task:
    """One forward or backward."""

    action: SingleCompute
    needs: tuple[Message, ...]
    """What it waits for, by stage."""
    makes: tuple[Message, ...]
    """What it makes for other stages, by stage."""
    is_split: bool
    """Whether this microbatch's backward on this stage comes in two halves."""
    completes_grads: bool
    """Whether this adds the last weight gradient of its stage in this step."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One action of the order, as the tasks it consists of: two for an overlap, none for a send."""

    action: Action
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What `rank` does in a step."""

    rank: Rank
    flow: Dataflow
    entries: tuple[Entry, ...]
    arriving: dict[Rank, tuple[Message, ...]]
    """By sender, the messages in the order in which they come."""
    received_before: dict[Message, tuple[Rank, int]]
    """For messages that arrive: their sender, and how many of ours it has received by then."""
    channels: frozenset[Channel]
    """Those of the whole schedule."""


def make_program(schedule: Schedule, rank: Rank, skips: Collection[Skip] = ()) -> Program:
    """The program of `rank`; the sends that the schedule lacks are added.

    `skips` are those of the model; also where both stages are on one rank, and nothing is sent.
    """
    lowered = add_sends(schedule, skips)
    flow = Dataflow(lowered, skips)
    arriving = {
        sender: tuple(_sent_to(rank, order, flow))
        for sender, order in enumerate(lowered.orders)
        if sender != rank
    }
    return Program(
        rank=rank,
        flow=flow,
        entries=tuple(_entries(lowered.orders[rank], flow)),
        arriving={sender: messages for sender, messages in arriving.items() if messages},
        received_before=_acknowledgements(lowered, flow, rank),
        channels=frozenset(
            flow.channel(message) for order in lowered.orders for message in sent_by(order)
        ),
    )


def _sent_to(receiver: Rank, order: tuple[Action, ...], flow: Dataflow) -> Iterator[Message]:
    """What goes to one rank, in order."""
    for message in sent_by(order):
        if flow.channel(message).receiver == receiver:
            yield message


def _entries(order: tuple[Action, ...], flow: Dataflow) -> Iterator[Entry]:
    computes = [part for action in order for part in compute_parts(action)]
    split = {(part.stage, part.mb) for part in computes if isinstance(part, BackwardInput)}
    last: dict[StageId, SingleCompute] = {
        part.stage: part for part in computes if isinstance(part, Backward | BackwardWeight)
    }
    for action in order:
        yield Entry(
            action,
            tuple(
                Task(
                    part,
                    needs=flow.needed(part),
                    makes=flow.made(part),
                    is_split=(part.stage, part.mb) in split,
                    completes_grads=last.get(part.stage) == part,
                )
                for part in compute_parts(action)
            ),
        )


def _acknowledgements(
    schedule: Schedule, flow: Dataflow, rank: Rank
) -> dict[Message, tuple[Rank, int]]:
    """For each message that comes to `rank`: how many of ours its sender has received by then.

    A rank acts in order, so what it has waited for before it sends has arrived. That lets go of
    what was sent without asking the backend, which for gloo does not know before it is waited for.
    """
    known: dict[Message, tuple[Rank, int]] = {}
    for sender, order in enumerate(schedule.orders):
        # Messages of a channel arrive in order: if one has been waited for, so have those before.
        ours = _sent_to(sender, schedule.orders[rank], flow)
        place = {message: number for number, message in enumerate(ours, 1)}
        received = 0
        for action in order:
            for message in flow.needed(action):
                received = max(received, place.get(message, 0))
            if isinstance(action, Send) and flow.channel(action.message).receiver == rank:
                known[action.message] = sender, received
    return known

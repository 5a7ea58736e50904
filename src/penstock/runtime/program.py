"""What one rank has to do in a step, worked out from the schedule before anything runs.

A schedule says in which order a rank acts. Its program adds what can be known ahead: where each
input comes from, in which order the messages of each channel come, which backward is split, which
weight gradient is a stage's last, and when a message that was sent has surely been received.
"""

from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass

from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Rank,
    Schedule,
    StageId,
)
from penstock.ir.action import RECV_TYPES, SEND_TYPES, Send, SingleCompute, compute_parts, parts
from penstock.ir.inputs import Described, Input
from penstock.passes import add_comms
from penstock.runtime.messages.routes import Key, Routes, Skip


@dataclass(frozen=True, slots=True)
class Task:
    """One forward or backward, or one send."""

    action: SingleCompute | Send
    needs: Input | None
    """What it waits for from the stage next to it, if anything."""
    makes: Input | None
    """What it makes for the stage next to it, or sends; nothing for a weight backward, say."""
    needs_from_afar: tuple[Described, ...]
    """What it waits for that skips stages."""
    makes_for_afar: tuple[Described, ...]
    """What it makes that skips stages."""
    is_split: bool
    """Whether this microbatch's backward on this stage comes in two halves."""
    completes_grads: bool
    """Whether this adds the last weight gradient of its stage in this step."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One action of the order, as the tasks it consists of: two for an overlap."""

    action: Action
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What `rank` does in a step."""

    rank: Rank
    routes: Routes
    entries: tuple[Entry, ...]
    arriving: dict[Rank, tuple[Key, ...]]
    """By sender, the messages in the order in which they come."""
    received_before: dict[Key, tuple[Rank, int]]
    """For messages that arrive: their sender, and how many of ours it has received by then."""


def make_program(
    schedule: Schedule,
    rank: Rank,
    *,
    whole: Container[StageId] = frozenset(),
    skips: Collection[Skip] = (),
) -> Program:
    """The program of `rank`; sends and receives are added if the schedule has none.

    The stages in `whole` run full backwards: where the schedule has I, and nothing where it has W.
    `skips` are those that begin or end at a stage of this rank.
    """
    lowered = schedule if schedule.has_comms else add_comms(schedule)
    routes = Routes(lowered, skips)
    arriving = {
        sender: tuple(_sent_to(rank, order, routes))
        for sender, order in enumerate(lowered.orders)
        if sender != rank
    }
    return Program(
        rank=rank,
        routes=routes,
        entries=tuple(_entries(_fused(lowered.orders[rank], whole), routes)),
        arriving={sender: keys for sender, keys in arriving.items() if keys},
        received_before=_acknowledgements(lowered, routes, rank),
    )


def _sent_to(receiver: Rank, order: Iterable[Action], routes: Routes) -> Iterator[Key]:
    """What goes to one rank, in order."""
    for action in order:
        for part in parts(action):
            for key in routes.sent(part):
                if routes.channel(key).receiver == receiver:
                    yield key


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, each rank's in the same order."""
    orders = [
        [part for action in order for part in compute_parts(action) if isinstance(part, Forward)]
        for order in schedule.orders
    ]
    return Schedule(orders, schedule.placement, schedule.num_microbatches)


def split_stages(schedule: Schedule) -> frozenset[StageId]:
    """The stages whose backward comes in two halves."""
    return frozenset(
        part.stage
        for order in schedule.orders
        for action in order
        for part in compute_parts(action)
        if isinstance(part, BackwardInput)
    )


def _fused(order: Iterable[Action], whole: Container[StageId]) -> Iterator[Action]:
    for action in order:
        if isinstance(action, Overlap):
            _, backward = _fused((action.forward, action.backward), whole)
            yield Overlap(action.forward, backward)  # type: ignore[arg-type]  # still a backward
        elif isinstance(action, BackwardInput) and action.stage in whole:
            yield Backward(action.stage, action.mb)
        elif not (isinstance(action, BackwardWeight) and action.stage in whole):
            yield action


def _entries(actions: Iterable[Action], routes: Routes) -> Iterator[Entry]:
    order = tuple(actions)
    computes = [part for action in order for part in compute_parts(action)]
    split = {(part.stage, part.mb) for part in computes if isinstance(part, BackwardInput)}
    last: dict[StageId, SingleCompute] = {
        part.stage: part for part in computes if isinstance(part, Backward | BackwardWeight)
    }
    for action in order:
        if isinstance(action, RECV_TYPES):
            continue
        tasks: Iterable[SingleCompute | Send] = (
            (action,) if isinstance(action, SEND_TYPES) else compute_parts(action)
        )
        yield Entry(
            action,
            tuple(
                Task(
                    task,
                    needs=routes.needed_from_neighbour(task),
                    makes=routes.made_for_neighbour(task),
                    needs_from_afar=routes.needed_from_afar(task),
                    makes_for_afar=routes.made_for_afar(task),
                    is_split=(task.stage, task.mb) in split,
                    completes_grads=last.get(task.stage) == task,
                )
                for task in tasks
            ),
        )


def _acknowledgements(
    schedule: Schedule, routes: Routes, rank: Rank
) -> dict[Key, tuple[Rank, int]]:
    """For each message that comes to `rank`: how many of ours its sender has received by then.

    A rank acts in order, so what it has waited for before it sends has arrived. That lets go of
    what was sent without asking the backend, which for gloo does not know before it is waited for.
    """
    known: dict[Key, tuple[Rank, int]] = {}
    for sender, order in enumerate(schedule.orders):
        # Messages of a channel arrive in order: if one has been waited for, so have those before.
        ours = _sent_to(sender, schedule.orders[rank], routes)
        place = {key: number for number, key in enumerate(ours, 1)}
        received = 0
        for part in (part for action in order for part in parts(action)):
            for key in routes.needed(part):
                received = max(received, place.get(key, 0))
            for key in routes.sent(part):
                if routes.channel(key).receiver == rank:
                    known[key] = sender, received
    return known

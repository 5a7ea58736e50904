"""What one rank has to do in a step, worked out from the schedule before anything runs.

A schedule says in which order a rank acts. Its program adds what can be known ahead: where each
input comes from, in which order the messages of each channel come, which backward is split, which
weight gradient is a stage's last, and when a message that was sent has surely been received.
"""

from collections.abc import Container, Iterable, Iterator
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
from penstock.ir.action import RECV_TYPES, SEND_TYPES, Send, SingleCompute, compute_parts
from penstock.ir.inputs import Input, Inputs
from penstock.passes import add_comms


@dataclass(frozen=True, slots=True)
class Task:
    """One forward or backward, or one send."""

    action: SingleCompute | Send
    needs: Input | None
    """What it waits for, if anything."""
    makes: Input | None
    """What it makes for another stage, or sends; nothing if it is a weight backward, say."""
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
    inputs: Inputs
    entries: tuple[Entry, ...]
    arriving: dict[Rank, tuple[Input, ...]]
    """By sender, the messages in the order in which they come."""
    received_before: dict[Input, tuple[Rank, int]]
    """For messages that arrive: their sender, and how many of ours it has received by then."""


def make_program(
    schedule: Schedule, rank: Rank, *, whole: Container[StageId] = frozenset()
) -> Program:
    """The program of `rank`; sends and receives are added if the schedule has none.

    The stages in `whole` run full backwards: where the schedule has I, and nothing where it has W.
    """
    lowered = schedule if schedule.has_comms else add_comms(schedule)
    inputs = Inputs(lowered)
    order = lowered.orders[rank]
    arriving: dict[Rank, list[Input]] = {}
    for action in order:
        for key in inputs.received(action):
            arriving.setdefault(inputs.channel(key).sender, []).append(key)
    return Program(
        rank=rank,
        inputs=inputs,
        entries=tuple(_entries(_fused(order, whole), inputs)),
        arriving={sender: tuple(keys) for sender, keys in arriving.items()},
        received_before=_acknowledgements(lowered, inputs, rank),
    )


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, each rank's in the same order."""
    orders = [
        [part for action in order for part in compute_parts(action) if isinstance(part, Forward)]
        for order in schedule.orders
    ]
    return Schedule(orders, schedule.placement, schedule.num_microbatches)


def _fused(order: Iterable[Action], whole: Container[StageId]) -> Iterator[Action]:
    for action in order:
        if isinstance(action, Overlap):
            _, backward = _fused((action.forward, action.backward), whole)
            yield Overlap(action.forward, backward)  # type: ignore[arg-type]  # still a backward
        elif isinstance(action, BackwardInput) and action.stage in whole:
            yield Backward(action.stage, action.mb)
        elif not (isinstance(action, BackwardWeight) and action.stage in whole):
            yield action


def _entries(actions: Iterable[Action], inputs: Inputs) -> Iterator[Entry]:
    order = tuple(actions)
    parts = [part for action in order for part in compute_parts(action)]
    split = {(part.stage, part.mb) for part in parts if isinstance(part, BackwardInput)}
    last: dict[StageId, SingleCompute] = {
        part.stage: part for part in parts if isinstance(part, Backward | BackwardWeight)
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
                    needs=_only(inputs.needed(task)),
                    makes=_only(inputs.made(task) or inputs.sent(task)),
                    is_split=(task.stage, task.mb) in split,
                    completes_grads=last.get(task.stage) == task,
                )
                for task in tasks
            ),
        )


def _only(keys: tuple[Input, ...]) -> Input | None:
    return keys[0] if keys else None


def _acknowledgements(
    schedule: Schedule, inputs: Inputs, rank: Rank
) -> dict[Input, tuple[Rank, int]]:
    """For each message that comes to `rank`: how many of ours its sender has received by then.

    A rank acts in order, so what it has waited for before it sends has arrived. That lets go of
    what was sent without asking the backend, which for gloo does not know before it is waited for.
    """
    known: dict[Input, tuple[Rank, int]] = {}
    for sender, order in enumerate(schedule.orders):
        # Messages of a channel arrive in order: if one has been waited for, so have those before.
        ours = [key for action in order for key in inputs.received(action)]
        place = {
            key: number
            for number, key in enumerate((k for k in ours if inputs.channel(k).sender == rank), 1)
        }
        received = 0
        for action in order:
            for key in inputs.needed(action):
                received = max(received, place.get(key, 0))
            for key in inputs.sent(action):
                if inputs.channel(key).receiver == rank:
                    known[key] = sender, received
    return known

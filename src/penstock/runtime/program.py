"""One rank's actions in a step, prepared from the schedule before anything runs.

A schedule gives the order of a rank's actions. The program adds what is known in advance: which
messages each action needs and makes, and their order on each channel; which backward is split;
which weight gradient is a stage's last; and when a sent message has certainly been received.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Rank,
    Recompute,
    ReduceGrads,
    Reshard,
    Schedule,
    Send,
    Skip,
    StageId,
    Unshard,
)
from penstock.ir.action import SingleCompute, compute_parts, in_words, recomputed_by
from penstock.ir.dataflow import Dataflow, sent_by
from penstock.ir.lazy_orders import Order
from penstock.ir.message import Channel
from penstock.passes import verify
from penstock.passes.sends_and_skips import flow_of_sends, with_sends
from penstock.watch.place import as_action


@dataclass(frozen=True, slots=True)
class Task:
    """One forward or backward."""

    action: SingleCompute
    needs: tuple[Message, ...]
    """The messages that it waits for, by stage."""
    makes: tuple[Message, ...]
    """The messages that it makes for other stages, by stage."""
    is_split: bool
    """True if this microbatch's backward on this stage is split."""
    completes_grads: bool
    """True if this adds the last weight gradient of its stage in this step."""
    drops: bool
    """True for a forward that keeps only its inputs, as it is recomputed before its backward."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One action of the order, and its tasks: two for an overlap, none for a send."""

    action: Action
    tasks: tuple[Task, ...]
    words: bytes
    """The action as the watch shows it."""


@dataclass(frozen=True, slots=True)
class Program:
    """The program of `rank` in a step."""

    rank: Rank
    flow: Dataflow
    entries: tuple[Entry, ...]
    arriving: dict[Rank, tuple[Message, ...]]
    """The messages from each sender, in the order in which they arrive."""
    received_before: dict[Message, tuple[Rank, int]]
    """For each arriving message: its sender, and how many of ours that had received before."""
    gathered: frozenset[StageId]
    """The stages for which the schedule says when parameters are gathered."""
    channels: frozenset[Channel]
    """The channels that end at this rank."""
    recomputes: bool
    """True if some forwards run twice."""


def make_program(
    schedule: Schedule,
    rank: Rank,
    skips: Collection[Skip] = (),
    sharded: Collection[StageId] = (),
) -> Program:
    """Make the program of `rank`; sends that the schedule lacks are added.

    Only its order is used, and those of the ranks with which it exchanges messages.

    `skips` are the model's, including those between stages of one rank, where nothing is sent.
    The gradients of the rank's `sharded` stages are reduced once, after their last backward.
    """
    verify(schedule, rank=rank)
    sends = flow_of_sends(schedule, skips)
    flow = Dataflow(schedule, skips)
    order = tuple(with_sends(schedule.orders[rank], sends))
    others = {
        other: tuple(with_sends(schedule.orders[other], sends)) for other in sends.partners(rank)
    }
    arriving = {sender: tuple(_sent_to(rank, theirs, flow)) for sender, theirs in others.items()}
    arriving = {sender: messages for sender, messages in arriving.items() if messages}
    return Program(
        rank=rank,
        flow=flow,
        entries=tuple(_entries(_with_frees_and_reductions(order, sharded), flow)),
        arriving=arriving,
        received_before=_acknowledgements(order, others, flow, rank),
        gathered=frozenset(action.stage for action in order if isinstance(action, Unshard)),
        channels=frozenset(
            [Channel(sender, rank) for sender in arriving] + list(map(flow.channel, sent_by(order)))
        ),
        recomputes=any(isinstance(action, Recompute) for action in order),
    )


def _sent_to(receiver: Rank, order: Order, flow: Dataflow) -> Iterator[Message]:
    """Yield the messages that go to one rank, in order."""
    for message in sent_by(order):
        if flow.channel(message).receiver == receiver:
            yield message


def _with_frees_and_reductions(order: Order, sharded: Collection[StageId]) -> Order:
    """Free and reduce each sharded stage as early as can be, unless the order says when."""
    reduced = {action.stage for action in order if isinstance(action, ReduceGrads)}
    gathered = {action.stage for action in order if isinstance(action, Unshard)}
    last_use: dict[StageId, int] = {}
    last_grads: dict[StageId, int] = {}
    for place, action in enumerate(order):
        for part in compute_parts(action):
            if isinstance(part, Backward | BackwardWeight):
                last_grads[part.stage] = place
            if not isinstance(part, BackwardWeight):
                last_use[part.stage] = place
    after: dict[int, list[Action]] = defaultdict(list)
    for stage in sorted(set(sharded) & last_grads.keys()):
        if stage not in gathered and last_use[stage] < last_grads[stage]:
            after[last_use[stage]].append(Reshard(stage))
        if stage not in reduced:
            after[last_grads[stage]].append(ReduceGrads(stage))
    if not after:
        return order
    return tuple(
        action for place, own in enumerate(order) for action in (own, *after.get(place, ()))
    )


def _entries(order: Order, flow: Dataflow) -> Iterator[Entry]:
    computes = [part for action in order for part in compute_parts(action)]
    split = {(part.stage, part.mb) for part in computes if isinstance(part, BackwardInput)}
    recomputed = recomputed_by(order)
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
                    drops=isinstance(part, Forward) and (part.stage, part.mb) in recomputed,
                )
                for part in compute_parts(action)
            ),
            as_action(in_words(action)),
        )


def _acknowledgements(
    order: Order, others: Mapping[Rank, Order], flow: Dataflow, rank: Rank
) -> dict[Message, tuple[Rank, int]]:
    """Return, for each message to `rank`, how many of ours its sender had received before.

    `order` is that of `rank`, and `others` are those of the ranks that send it something.

    A rank acts in order, so everything that it waited for before a send has arrived. Thus sent
    tensors can be released without asking the backend; gloo does not know until it is waited for.
    """
    known: dict[Message, tuple[Rank, int]] = {}
    for sender, theirs in others.items():
        # Messages of a channel arrive in order: if one has arrived, so have those before it.
        ours = _sent_to(sender, order, flow)
        place = {message: number for number, message in enumerate(ours, 1)}
        received = 0
        for action in theirs:
            for message in flow.needed(action):
                received = max(received, place.get(message, 0))
            if isinstance(action, Send) and flow.channel(action.message).receiver == rank:
                known[action.message] = sender, received
    return known

"""The rules of sends and receives: each message once, in place, in one order at both ends."""

from penstock.ir import Message, Rank, Recv, Schedule, Send
from penstock.ir.dataflow import Dataflow
from penstock.ir.excerpts import error_at
from penstock.ir.message import Channel


def check_comms(schedule: Schedule) -> None:
    """Raise an error at the first broken rule; actions must be complete and on their ranks."""
    flow = Dataflow(schedule)
    has_receives = any(isinstance(action, Recv) for order in schedule.orders for action in order)
    sent: dict[Channel, list[Message]] = {}
    received: dict[Channel, list[tuple[Message, int]]] = {}
    for rank in range(schedule.num_ranks):
        for message in _check_sends(schedule, flow, rank):
            sent.setdefault(flow.channel(message), []).append(message)
        if has_receives:
            for message, position in _check_receives(schedule, flow, rank):
                received.setdefault(flow.channel(message), []).append((message, position))
    for channel, receives in received.items():
        for expected, (message, position) in zip(sent[channel], receives, strict=True):
            if expected != message:
                raise error_at(
                    schedule.orders,
                    channel.receiver,
                    position,
                    f"{Recv(message)} comes where rank {channel.sender} runs {Send(expected)}",
                    "Messages from one rank to another arrive in the order in which they are sent. "
                    f"Put {Recv(expected)} first, or send in the order of the receives.",
                )


def _check_sends(schedule: Schedule, flow: Dataflow, rank: Rank) -> list[Message]:
    """Return what `rank` sends, in order: each message once, after the action that makes it."""
    order = schedule.orders[rank]
    sent: list[Message] = []
    due: dict[Message, int] = {}
    for position, action in enumerate(order):
        if isinstance(action, Send):
            if action.message not in due:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} has nothing to send",
                    "A send must follow the action whose result another rank needs, "
                    "and occur once. Move it after that action, or remove it.",
                )
            del due[action.message]
            sent.append(action.message)
        for message in filter(flow.is_sent, flow.made(action)):
            due[message] = position
    for message, position in due.items():
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{Send(message)} is missing after {order[position]}",
            "A schedule with sends and receives needs all of them. "
            "Add it, or remove them all with remove_comms and add them with add_comms.",
        )
    return sent


def _check_receives(schedule: Schedule, flow: Dataflow, rank: Rank) -> list[tuple[Message, int]]:
    """Return what `rank` receives and at which position: each message once, before it is needed."""
    received: list[tuple[Message, int]] = []
    posted: dict[Message, int] = {}
    for position, action in enumerate(schedule.orders[rank]):
        if isinstance(action, Recv):
            if not flow.has(action.message) or action.message in posted:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} has nothing to receive",
                    "A receive must be for a message from another rank, and occur once. Remove it.",
                )
            posted[action.message] = position
            received.append((action.message, position))
        for message in filter(flow.is_sent, flow.needed(action)):
            if posted.pop(message, None) is None:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} runs before {Recv(message)}",
                    "A message from another rank must be received first. "
                    "Add the receive, or move it earlier.",
                )
    for message, position in posted.items():
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{Recv(message)} receives a message that no later action needs",
            "A receive must come before the action that needs the other rank's message, "
            "and occur once. Remove it.",
        )
    return received

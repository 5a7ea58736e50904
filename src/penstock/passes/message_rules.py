"""The rules of sends and receives: each message once, on its side, in one order at both ends."""

from penstock.ir import Rank, Schedule
from penstock.ir.action import RECV_TYPES, SEND_TYPES
from penstock.ir.excerpts import error_at
from penstock.ir.inputs import Channel, Input, Inputs


def check_comms(schedule: Schedule) -> None:
    """Raises at the first rule that is broken; takes for granted that all is there and placed."""
    inputs = Inputs(schedule)
    sent: dict[Channel, list[Input]] = {}
    received: dict[Channel, list[tuple[Input, int]]] = {}
    for rank in range(schedule.num_ranks):
        for key in _check_sends(schedule, inputs, rank):
            sent.setdefault(inputs.channel(key), []).append(key)
        for key, position in _check_receives(schedule, inputs, rank):
            received.setdefault(inputs.channel(key), []).append((key, position))
    for channel, receives in received.items():
        for expected, (key, position) in zip(sent[channel], receives, strict=True):
            if expected != key:
                raise error_at(
                    schedule.orders,
                    channel.receiver,
                    position,
                    f"{inputs.recv(key)} comes where rank {channel.sender} "
                    f"runs {inputs.send(expected)}",
                    "Messages from one rank to another arrive in the order in which they are sent. "
                    f"Put {inputs.recv(expected)} first, or send in the order of the receives.",
                )


def _check_sends(schedule: Schedule, inputs: Inputs, rank: Rank) -> list[Input]:
    """What `rank` sends, in order: each message once, after the action that makes it."""
    order = schedule.orders[rank]
    sent: list[Input] = []
    due: dict[Input, int] = {}
    for position, action in enumerate(order):
        if isinstance(action, SEND_TYPES):
            keys = [key for key in inputs.sent(action) if key in due]
            if not keys:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} has nothing to send",
                    "A send must follow the action whose result another rank needs, "
                    "and be there once. Move it behind that action, or remove it.",
                )
            del due[keys[0]]
            sent += keys
        for key in inputs.made(action):
            if inputs.is_message(key):
                due[key] = position
    for key, position in due.items():
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{inputs.send(key)} is missing after {order[position]}",
            "Once a schedule has sends and receives it needs all of them. "
            "Add it, or take them all out with remove_comms and place them with add_comms.",
        )
    return sent


def _check_receives(schedule: Schedule, inputs: Inputs, rank: Rank) -> list[tuple[Input, int]]:
    """What `rank` receives, in order, and where: each message once, before who needs it."""
    received: list[tuple[Input, int]] = []
    posted: dict[Input, int] = {}
    for position, action in enumerate(schedule.orders[rank]):
        if isinstance(action, RECV_TYPES):
            keys = [key for key in inputs.received(action) if key not in posted]
            if not keys:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} has nothing to receive",
                    "A receive is for what another rank sends, and must be there once. Remove it.",
                )
            posted[keys[0]] = position
            received.append((keys[0], position))
        for key in inputs.needed(action):
            if inputs.is_message(key) and posted.pop(key, None) is None:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} runs before {inputs.recv(key)}",
                    "What another rank makes must be received first. "
                    "Add the receive, or move it before.",
                )
    for key, position in posted.items():
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{inputs.recv(key)} receives what nothing behind it needs",
            "A receive must come before the action that needs it, from another rank, "
            "and be there once. Remove it.",
        )
    return received

"""The rules of sends and receives: each message once, on its side, in one order at both ends."""

from penstock.ir import Rank, RecvActivation, RecvGradient, Schedule, SendActivation, SendGradient
from penstock.ir.action import Recv, Send
from penstock.ir.channel import Channel, channel_of, receive_of, receives_before, sends_after
from penstock.ir.excerpt import error_at


def check_comms(schedule: Schedule) -> None:
    """Raises at the first rule that is broken; takes for granted that the computes are right."""
    sent: dict[Channel, list[Recv]] = {}
    received: dict[Channel, list[tuple[Recv, int]]] = {}
    for rank in range(schedule.num_ranks):
        for send in _check_sends(schedule, rank):
            channel = channel_of(send, schedule.placement)
            sent.setdefault(channel, []).append(receive_of(send))
        for receive, position in _check_receives(schedule, rank):
            channel = channel_of(receive, schedule.placement)
            received.setdefault(channel, []).append((receive, position))
    for channel, receives in received.items():
        for expected, (receive, position) in zip(sent[channel], receives, strict=True):
            if expected != receive:
                raise error_at(
                    schedule.orders,
                    channel.receiver,
                    position,
                    f"{receive} comes where rank {channel.sender} sends for {expected}",
                    "Messages from one rank to another arrive in the order in which they are sent. "
                    f"Receive {expected} first, or send it later.",
                )


def _check_sends(schedule: Schedule, rank: Rank) -> list[Send]:
    """The sends of `rank` in order, each once and after the action that makes what it sends."""
    order = schedule.orders[rank]
    sends: list[Send] = []
    due: dict[Send, int] = {}
    for position, action in enumerate(order):
        if isinstance(action, SendActivation | SendGradient):
            if action not in due:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} has nothing to send",
                    "A send must follow the action whose result another rank needs, "
                    "and be there once. Move it behind that action, or remove it.",
                )
            del due[action]
            sends.append(action)
        for send in sends_after(action, schedule.placement):
            due[send] = position
    if due:
        send, position = next(iter(due.items()))
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{send} is missing after {order[position]}",
            "Once a schedule has sends and receives it needs all of them. "
            "Add it, or take them all out with remove_comms and place them with add_comms.",
        )
    return sends


def _check_receives(schedule: Schedule, rank: Rank) -> list[tuple[Recv, int]]:
    """The receives of `rank` in order, each once and before the action that needs it."""
    receives: list[tuple[Recv, int]] = []
    posted: dict[Recv, int] = {}
    for position, action in enumerate(schedule.orders[rank]):
        if isinstance(action, RecvActivation | RecvGradient):
            if action in posted:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} is there a second time",
                    "A message must be received once. Remove one.",
                )
            posted[action] = position
            receives.append((action, position))
        for needed in receives_before(action, schedule.placement):
            if posted.pop(needed, None) is None:
                raise error_at(
                    schedule.orders,
                    rank,
                    position,
                    f"{action} runs before {needed}",
                    "What another rank makes must be received first. "
                    "Add the receive, or move it before.",
                )
    for receive, position in posted.items():
        raise error_at(
            schedule.orders,
            rank,
            position,
            f"{receive} receives what nothing behind it needs",
            "A receive must come before the action that needs it, from another rank, "
            "and be there once. Remove it.",
        )
    return receives

"""Places the sends and receives, and takes them out again."""

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.ir import Action, Placement, Schedule
from penstock.ir.action import Recv, is_compute
from penstock.ir.channel import Channel, channel_of, receive_of, receives_before, sends_after
from penstock.passes.verify import verify


def add_comms(schedule: Schedule) -> Schedule:
    """The schedule with a send after each action whose result another rank needs, and its receive.

    A receive comes right before the action that needs it, behind those that were sent before it,
    so that both ends of a channel see the messages in one order.

    >>> print(add_comms(Schedule.from_csv("0F0,0B0\\n1F0,1B0\\n")).to_csv(), end="")
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """
    if schedule.has_comms:
        raise ScheduleError(
            "The schedule already has sends and receives. "
            "Give add_comms one without, such as remove_comms returns."
        )
    verify(schedule)
    placement = schedule.placement
    sent: dict[Channel, list[Recv]] = {}
    for order in schedule.orders:
        for action in order:
            for send in sends_after(action, placement):
                sent.setdefault(channel_of(send, placement), []).append(receive_of(send))
    arriving = {channel: iter(receives) for channel, receives in sent.items()}
    orders = [list(_lower(order, placement, arriving)) for order in schedule.orders]
    return Schedule(orders, placement, schedule.num_microbatches)


def remove_comms(schedule: Schedule) -> Schedule:
    """The schedule without its sends and receives."""
    orders = [filter(is_compute, order) for order in schedule.orders]
    return Schedule(orders, schedule.placement, schedule.num_microbatches)


def _lower(
    order: tuple[Action, ...], placement: Placement, arriving: dict[Channel, Iterator[Recv]]
) -> Iterator[Action]:
    posted: set[Recv] = set()
    for action in order:
        for needed in receives_before(action, placement):
            while needed not in posted:
                receive = next(arriving[channel_of(needed, placement)])
                posted.add(receive)
                yield receive
        yield action
        yield from sends_after(action, placement)

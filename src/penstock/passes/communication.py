"""Places the sends and receives, and takes them out again."""

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.ir import Action, Schedule
from penstock.ir.action import is_compute
from penstock.ir.inputs import Channel, Input, Inputs
from penstock.passes.verification import verify


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
    inputs = Inputs(schedule)
    sent: dict[Channel, list[Input]] = {}
    for order in schedule.orders:
        for action in order:
            for key in filter(inputs.is_message, inputs.made(action)):
                sent.setdefault(inputs.channel(key), []).append(key)
    arriving = {channel: iter(keys) for channel, keys in sent.items()}
    orders = [list(_lower(order, inputs, arriving)) for order in schedule.orders]
    return Schedule(orders, schedule.placement, schedule.num_microbatches)


def remove_comms(schedule: Schedule) -> Schedule:
    """The schedule without its sends and receives."""
    orders = [filter(is_compute, order) for order in schedule.orders]
    return Schedule(orders, schedule.placement, schedule.num_microbatches)


def _lower(
    order: tuple[Action, ...], inputs: Inputs, arriving: dict[Channel, Iterator[Input]]
) -> Iterator[Action]:
    posted: set[Input] = set()
    for action in order:
        for needed in filter(inputs.is_message, inputs.needed(action)):
            while needed not in posted:
                key = next(arriving[inputs.channel(needed)])
                posted.add(key)
                yield inputs.recv(key)
        yield action
        for key in filter(inputs.is_message, inputs.made(action)):
            yield inputs.send(key)

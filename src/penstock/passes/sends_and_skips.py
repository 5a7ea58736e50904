"""Add the sends and receives of a schedule, and remove them again."""

from collections.abc import Iterable, Iterator

from penstock.errors import ScheduleError
from penstock.ir import Action, Message, Recv, Schedule, Send, Skip
from penstock.ir.action import COMM_TYPES
from penstock.ir.dataflow import Dataflow, sent_by
from penstock.ir.lazy_orders import Order
from penstock.ir.message import Channel
from penstock.passes.verification import verify


def add_sends(schedule: Schedule, skips: Iterable[tuple[int, int]] = ()) -> Schedule:
    """Return the schedule with a send after each action whose result another rank needs.

    This is how it is executed. `skips` are pairs of stages, not neighbours, of which the second
    uses a value that the first makes. Existing sends stay where they are. Receives are left out:
    the runtime posts them ahead.

    >>> print(add_sends(Schedule.from_csv("0F0\\n1F0\\n2F0\\n"), [(0, 2)]).to_csv(), end="")
    0F0,0SEND_F0,0SEND_F0>2
    1F0,1SEND_F0
    2F0
    """
    verify(schedule)
    flow = flow_of_sends(schedule, skips)
    return schedule.with_orders(with_sends(order, flow) for order in schedule.orders)


def flow_of_sends(schedule: Schedule, skips: Iterable[tuple[int, int]]) -> Dataflow:
    """Return the messages of a schedule that `add_sends` gives these skips."""
    return Dataflow(schedule, {*schedule.skips, *_checked(skips, schedule.num_stages)})


def with_sends(order: Order, flow: Dataflow) -> Iterator[Action]:
    """Yield one rank's order as `add_sends` makes it; the schedule must be verified."""
    present = set(sent_by(order))
    for action in order:
        if not isinstance(action, Recv):
            yield action
        for message in flow.made(action):
            if flow.is_sent(message) and message not in present:
                yield Send(message)


def add_comms(schedule: Schedule, skips: Iterable[tuple[int, int]] = ()) -> Schedule:
    """Return the schedule with its sends, as `add_sends` adds them, and a receive for each.

    A receive comes right before the action that needs it, after those that were sent before it,
    so that both ends of a channel have the messages in the same order.

    >>> print(add_comms(Schedule.from_csv("0F0,0B0\\n1F0,1B0\\n")).to_csv(), end="")
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """
    if schedule.has_comms:
        raise ScheduleError(
            "The schedule already has sends and receives. "
            "Give add_comms a schedule without them, such as remove_comms returns."
        )
    with_sends = add_sends(schedule, skips)
    flow = Dataflow(with_sends)
    sent: dict[Channel, list[Message]] = {}
    for order in with_sends.orders:
        for message in sent_by(order):
            sent.setdefault(flow.channel(message), []).append(message)
    arriving = {channel: iter(messages) for channel, messages in sent.items()}
    return schedule.with_orders(
        list(_with_receives(order, flow, arriving)) for order in with_sends.orders
    )


def remove_comms(schedule: Schedule) -> Schedule:
    """Return the schedule without its sends and receives."""
    return schedule.with_orders(
        [action for action in order if not isinstance(action, COMM_TYPES)]
        for order in schedule.orders
    )


def _checked(skips: Iterable[tuple[int, int]], num_stages: int) -> Iterator[Skip]:
    for source, target in skips:
        if not 0 <= source < target - 1 < num_stages - 1:
            raise ScheduleError(
                f"skips has ({source}, {target}). Expected stages from 0 to {num_stages - 1}, the "
                "second at least two after the first: neighbours already have their messages."
            )
        yield Skip(source, target)


def _with_receives(
    order: Order, flow: Dataflow, arriving: dict[Channel, Iterator[Message]]
) -> Iterator[Action]:
    received: set[Message] = set()
    for action in order:
        for needed in filter(flow.is_sent, flow.needed(action)):
            while needed not in received:
                message = next(arriving[flow.channel(needed)])
                received.add(message)
                yield Recv(message)
        yield action

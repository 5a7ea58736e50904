"""Go through a schedule in an order in which ranks could run it.

A message is delivered by the action that makes it, or by its send if it goes to another rank and
the schedule has sends. All code that must know which action waits for which (the grid, `verify`,
the simulator) uses this walk.
"""

from collections.abc import Iterator
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.ir.action import Action, Recv, Send
from penstock.ir.dataflow import Dataflow
from penstock.ir.excerpts import excerpt, locate
from penstock.ir.message import Message, Rank
from penstock.ir.schedule import Schedule

# The rank, the action, the messages it needed and those it delivered: a plain tuple, for speed.
Visit: TypeAlias = tuple[Rank, Action, tuple[Message, ...], tuple[Message, ...]]


def walk(schedule: Schedule, *, blocking: bool = False) -> Iterator[Visit]:
    """Yield every action once, after those that deliver its inputs; time linear in the actions.

    If `blocking`, a receive waits for its message; otherwise only the action that needs it does.
    Raise an error if ranks wait for each other forever. All other rules must hold: see `verify`.
    """
    flow = Dataflow(schedule)
    by_send = schedule.has_comms
    orders = tuple(schedule.orders)  # Indexed for every action: lazy orders would be slow.
    positions = [0] * len(orders)
    at_hand: set[Message] = set()
    missing: dict[Rank, Message] = {}  # The input that a rank waits for,
    waiting: dict[Message, list[Rank]] = {}  # and the ranks that wait for it.
    ready = list(range(len(orders)))[::-1]
    while ready:
        rank = ready.pop()
        missing.pop(rank, None)
        for position in range(positions[rank], len(orders[rank])):
            action = orders[rank][position]
            needed = flow.needed(action)
            if blocking and isinstance(action, Recv):
                needed = (action.message,)
            if not at_hand.issuperset(needed):
                key = next(key for key in needed if key not in at_hand)
                missing[rank], positions[rank] = key, position
                waiting.setdefault(key, []).append(rank)
                break
            if isinstance(action, Send):
                delivered: tuple[Message, ...] = (action.message,)
            else:
                delivered = flow.made(action)
                if by_send:
                    delivered = tuple(key for key in delivered if not flow.is_sent(key))
            yield rank, action, needed, delivered
            for key in delivered:
                at_hand.add(key)
                if key in waiting:
                    ready.extend(waiting.pop(key))
    if missing:
        raise _stall(schedule, flow, positions, missing)


def _stall(
    schedule: Schedule, flow: Dataflow, positions: list[int], missing: dict[Rank, Message]
) -> ScheduleError:
    """Return the error for ranks that wait for `missing`; it shows the circle of waits."""
    circle = _find_circle(flow, missing)
    lines = []
    for rank in circle:
        message = missing[rank]
        lines.append(
            f"  rank {rank}: {excerpt(schedule.orders[rank], positions[rank])}\n"
            f"    waits for the {message.kind} of microbatch {message.mb} "
            f"from stage {message.maker} on rank {flow.channel(message).sender}"
        )
    first = circle[0]
    action = schedule.orders[first][positions[first]]
    if len(circle) > 1:
        rule = (
            "Ranks must not wait for each other in a circle. "
            "Move a marked action after those that the other ranks wait for."
        )
    else:
        rule = "The inputs of an action must be made first. Move it later, or add what is missing."
    where = locate(first, positions[first])
    return ScheduleError("\n".join([f"{where}: {action} waits forever", *lines, rule]))


def _find_circle(flow: Dataflow, missing: dict[Rank, Message]) -> list[Rank]:
    """Return the ranks that wait for each other, smallest first; or one that waits forever."""
    seen: list[Rank] = []
    rank = min(missing)
    while rank in missing and rank not in seen:
        seen.append(rank)
        rank = flow.channel(missing[rank]).sender
    circle = seen[seen.index(rank) :] if rank in seen else seen[-1:]
    turn = circle.index(min(circle))
    return circle[turn:] + circle[:turn]

"""Goes through a schedule in an order in which ranks could run it.

An input is delivered by the action that makes it, or by its send if it is a message and the
schedule has communication. All that must know what waits for what (the grid, `verify`, the
simulator) walks here.
"""

from collections.abc import Iterator
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.ir.action import Action, Rank
from penstock.ir.excerpts import excerpt, locate
from penstock.ir.inputs import Input, Inputs
from penstock.ir.schedule import Schedule

# The rank, the action, the inputs it needed and those it delivered: a plain tuple, for speed.
Step: TypeAlias = tuple[Rank, Action, tuple[Input, ...], tuple[Input, ...]]


def walk(schedule: Schedule, *, blocking: bool = False) -> Iterator[Step]:
    """Yields every action once, after all that delivers its inputs; time linear in the actions.

    If `blocking`, a receive waits for its message; otherwise only the action that needs it does.
    Raises if the ranks come to wait for each other. Takes the rest for granted: `verify` checks it.
    """
    inputs = Inputs(schedule)
    by_send = schedule.has_comms
    orders = schedule.orders
    positions = [0] * len(orders)
    at_hand: set[Input] = set()
    missing: dict[Rank, Input] = {}  # The input that a rank waits for,
    waiting: dict[Input, list[Rank]] = {}  # and the ranks that wait for it.
    ready = list(range(len(orders)))[::-1]
    while ready:
        rank = ready.pop()
        missing.pop(rank, None)
        for position in range(positions[rank], len(orders[rank])):
            action = orders[rank][position]
            needed = inputs.needed(action)
            if blocking and not needed:
                needed = inputs.received(action)
            if not at_hand.issuperset(needed):
                key = next(key for key in needed if key not in at_hand)
                missing[rank], positions[rank] = key, position
                waiting.setdefault(key, []).append(rank)
                break
            delivered = inputs.made(action)
            if by_send:
                handed_on = [key for key in delivered if not inputs.is_message(key)]
                delivered = (*handed_on, *inputs.sent(action))
            yield rank, action, needed, delivered
            for key in delivered:
                at_hand.add(key)
                if key in waiting:
                    ready.extend(waiting.pop(key))
    if missing:
        raise _stall(schedule, inputs, positions, missing)


def _stall(
    schedule: Schedule, inputs: Inputs, positions: list[int], missing: dict[Rank, Input]
) -> ScheduleError:
    """The error for ranks that wait for `missing`: it shows the circle in which they wait."""
    circle = _find_circle(inputs, missing)
    lines = []
    for rank in circle:
        is_gradient, maker, _, mb = inputs.describe(missing[rank])
        what = "gradient" if is_gradient else "activation"
        lines.append(
            f"  rank {rank}: {excerpt(schedule.orders[rank], positions[rank])}\n"
            f"    waits for the {what} of microbatch {mb} from stage {maker} "
            f"on rank {inputs.channel(missing[rank]).sender}"
        )
    first = circle[0]
    action = schedule.orders[first][positions[first]]
    if len(circle) > 1:
        rule = (
            "Ranks must not wait for each other in a circle. "
            "Move a marked action behind those that the other ranks wait for."
        )
    else:
        rule = "What an action needs must be made before. Move it behind, or add what is missing."
    where = locate(first, positions[first])
    return ScheduleError("\n".join([f"{where}: {action} waits forever", *lines, rule]))


def _find_circle(inputs: Inputs, missing: dict[Rank, Input]) -> list[Rank]:
    """The ranks that wait for each other, from the smallest on; or one that nobody will serve."""
    seen: list[Rank] = []
    rank = min(missing)
    while rank in missing and rank not in seen:
        seen.append(rank)
        rank = inputs.channel(missing[rank]).sender
    circle = seen[seen.index(rank) :] if rank in seen else seen[-1:]
    turn = circle.index(min(circle))
    return circle[turn:] + circle[:turn]

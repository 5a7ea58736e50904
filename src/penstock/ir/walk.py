"""Goes through a schedule in an order in which ranks could run it.

What an action waits for is an *input*: the activation of a forward, the gradient of a backward.
Inputs are delivered by the action that makes them, if both are on one rank or the schedule has
no communication, and otherwise by the send.
Everything that must know what waits for what (the grid, `verify`, the simulator) walks here.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.ir.action import (
    URGENT_BACKWARD_TYPES,
    Action,
    Forward,
    Overlap,
    Rank,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
)
from penstock.ir.excerpt import excerpt, locate
from penstock.ir.schedule import Schedule


class Inputs:
    """Numbers the inputs of a schedule: which an action needs, and which it delivers.

    Each (stage, microbatch) has two: an activation, and behind all activations a gradient.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_stages = schedule.placement.num_stages
        self.num_microbatches = schedule.num_microbatches
        ranks = schedule.placement.ranks
        by_send = schedule.has_comms
        # Whether stages k - 1 and k hand tensors over without a send; the ends have no neighbour.
        self.passes_on = [
            0 < stage < self.num_stages and (not by_send or ranks[stage - 1] == ranks[stage])
            for stage in range(self.num_stages + 1)
        ]

    def activation(self, stage: int, mb: int) -> int:
        return stage * self.num_microbatches + mb

    def gradient(self, stage: int, mb: int) -> int:
        return (self.num_stages + stage) * self.num_microbatches + mb

    def describe(self, key: int) -> tuple[bool, int, int]:
        """Whether an input is a gradient, and its stage and microbatch."""
        stage, mb = divmod(key, self.num_microbatches)
        gradient, stage = divmod(stage, self.num_stages)
        return gradient > 0, stage, mb

    # These are asked of every action of every walk: an if-chain takes half as long as match.

    def needed(self, action: Action) -> tuple[int, ...]:
        """The inputs that `action` cannot start without."""
        if isinstance(action, Forward):
            return (self.activation(action.stage, action.mb),) if action.stage > 0 else ()
        if isinstance(action, URGENT_BACKWARD_TYPES):
            last = action.stage == self.num_stages - 1
            return () if last else (self.gradient(action.stage, action.mb),)
        if isinstance(action, Overlap):
            return self.needed(action.forward) + self.needed(action.backward)
        return ()

    def received(self, action: Action) -> tuple[int, ...]:
        """The input that a receive is for."""
        if isinstance(action, RecvActivation):
            return (self.activation(action.stage, action.mb),)
        if isinstance(action, RecvGradient):
            return (self.gradient(action.stage, action.mb),)
        return ()

    def delivered(self, action: Action) -> tuple[int, ...]:
        """The inputs of other stages that can be had once `action` is done."""
        if isinstance(action, Forward):
            passes_on = self.passes_on[action.stage + 1]
            return (self.activation(action.stage + 1, action.mb),) if passes_on else ()
        if isinstance(action, URGENT_BACKWARD_TYPES):
            passes_on = self.passes_on[action.stage]
            return (self.gradient(action.stage - 1, action.mb),) if passes_on else ()
        if isinstance(action, Overlap):
            return self.delivered(action.forward) + self.delivered(action.backward)
        if isinstance(action, SendActivation):
            return (self.activation(action.stage + 1, action.mb),)
        if isinstance(action, SendGradient):
            return (self.gradient(action.stage - 1, action.mb),)
        return ()


class Step(NamedTuple):
    """One action of a walk, the inputs it needed and the inputs it delivered."""

    rank: Rank
    action: Action
    needed: tuple[int, ...]
    delivered: tuple[int, ...]


def walk(schedule: Schedule, *, blocking: bool = False) -> Iterator[Step]:
    """Yields every action once, after all that delivers its inputs; time linear in the actions.

    If `blocking`, a receive waits for its message; otherwise only the action that needs it does.
    Raises if the ranks come to wait for each other. Takes the rest for granted: `verify` checks it.
    """
    inputs = Inputs(schedule)
    orders = schedule.orders
    positions = [0] * len(orders)
    at_hand: set[int] = set()
    missing: dict[int, int] = {}  # The input that a rank waits for,
    waiting: dict[int, int] = {}  # and the rank that waits for it.
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
                missing[rank], waiting[key], positions[rank] = key, rank, position
                break
            delivered = inputs.delivered(action)
            yield Step(rank, action, needed, delivered)
            for key in delivered:
                at_hand.add(key)
                if key in waiting:
                    ready.append(waiting.pop(key))
    if missing:
        raise _stall(schedule, inputs, positions, missing)


def _stall(
    schedule: Schedule, inputs: Inputs, positions: list[int], missing: dict[int, int]
) -> ScheduleError:
    """The error for ranks that wait for `missing`: it shows the circle in which they wait."""
    circle = _find_circle(schedule, inputs, missing)
    lines = []
    for rank in circle:
        gradient, stage, mb = inputs.describe(missing[rank])
        sender = stage + 1 if gradient else stage - 1
        what = "gradient" if gradient else "activation"
        lines.append(
            f"  rank {rank}: {excerpt(schedule.orders[rank], positions[rank])}\n"
            f"    waits for the {what} of microbatch {mb} from stage {sender} "
            f"on rank {schedule.placement.ranks[sender]}"
        )
    first = circle[0]
    action = schedule.orders[first][positions[first]]
    return ScheduleError(
        f"{locate(first, positions[first])}: {action} waits for ever\n"
        + "\n".join(lines)
        + "\nRanks must not wait for each other in a circle. "
        "Move a marked action behind those that the other ranks wait for."
    )


def _find_circle(schedule: Schedule, inputs: Inputs, missing: dict[int, int]) -> list[int]:
    """The ranks that wait for each other, from the smallest on; or one that nobody will serve."""
    seen: list[int] = []
    rank = min(missing)
    while rank in missing and rank not in seen:
        seen.append(rank)
        gradient, stage, _ = inputs.describe(missing[rank])
        rank = schedule.placement.ranks[stage + 1 if gradient else stage - 1]
    circle = seen[seen.index(rank) :] if rank in seen else seen[-1:]
    turn = circle.index(min(circle))
    return circle[turn:] + circle[:turn]

"""Schedules of every algorithm in small shapes, and mutants of them that differ in one action."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

from penstock.errors import ScheduleError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Overlap,
    Recv,
    ReduceGrads,
    Reshard,
    Schedule,
    Send,
    Unshard,
)
from penstock.ir.action import SHARDING_TYPES
from penstock.passes import Gathers, add_comms, add_gathers, fuse_backward, split_backward
from penstock.schedules import REGISTRY

Orders = list[list[Action]]

FORMS: dict[str, Callable[[Schedule], Schedule]] = {
    "as made": lambda schedule: schedule,
    "split": split_backward,
    "fused": fuse_backward,
    "with comms": add_comms,
    "split, then with comms": lambda schedule: add_comms(split_backward(schedule)),
    "with comms, then split": lambda schedule: split_backward(add_comms(schedule)),
    "gathered once": lambda schedule: add_gathers(schedule, Gathers.once()),
    "gathered per need, then with comms": lambda schedule: add_comms(
        add_gathers(schedule, Gathers.per_need(ahead=0))
    ),
}
_SINGLE_TYPES: list[Any] = [
    Forward,
    Backward,
    BackwardInput,
    BackwardWeight,
    lambda stage, mb: Send(Message(stage, stage + 1, mb)),
    lambda stage, mb: Recv(Message(stage - 1, stage, mb)),
    lambda stage, mb: Send(Message(stage, stage - 1, mb)),
    lambda stage, mb: Recv(Message(stage + 1, stage, mb)),
    lambda stage, mb: Unshard(stage),
    lambda stage, mb: Reshard(stage),
    lambda stage, mb: ReduceGrads(stage),
]


@cache
def small_schedules(form: str) -> tuple[Schedule, ...]:
    """Every algorithm in each small shape that it can be made in, from the smallest."""
    found = []
    for p, m, v in ((p, m, v) for p in (1, 2, 3) for m in (1, 2, 3, 6) for v in (1, 2, 3)):
        for generator in REGISTRY:
            try:
                schedule = generator(num_ranks=p, num_microbatches=m, stages_per_rank=v)
            except ScheduleError:
                continue  # Not a shape for this algorithm.
            found.append(FORMS[form](schedule))
    return tuple(sorted(found, key=lambda schedule: schedule.num_actions))


def mutate(schedule: Schedule, kind: str, random: Random) -> Schedule:
    """The schedule with one change of that kind; the placement and microbatches stay."""
    orders = [list(order) for order in schedule.orders]
    MUTATIONS[kind](orders, random)
    return Schedule(orders, schedule.placement, schedule.num_microbatches)


def _choose(orders: Orders, random: Random) -> tuple[list[Action], int]:
    order = random.choice([order for order in orders if order])
    return order, random.randrange(len(order))


def _drop(orders: Orders, random: Random) -> None:
    order, position = _choose(orders, random)
    del order[position]


def _duplicate(orders: Orders, random: Random) -> None:
    order, position = _choose(orders, random)
    target = random.choice([order, order, random.choice(orders)])
    target.insert(random.randint(0, len(target)), order[position])


def _swap_neighbours(orders: Orders, random: Random) -> None:
    order, position = _choose(orders, random)
    after = min(position + 1, len(order) - 1)
    order[position], order[after] = order[after], order[position]


def _swap(orders: Orders, random: Random) -> None:
    order, position = _choose(orders, random)
    other = random.randrange(len(order))
    order[position], order[other] = order[other], order[position]


def _swap_across_ranks(orders: Orders, random: Random) -> None:
    (one, here), (other, there) = _choose(orders, random), _choose(orders, random)
    one[here], other[there] = other[there], one[here]


def _move(orders: Orders, random: Random) -> None:
    order, position = _choose(orders, random)
    order.insert(random.randrange(len(order)), order.pop(position))


def _move_across_ranks(orders: Orders, random: Random) -> None:
    order, position = _choose(orders, random)
    action = order.pop(position)
    target = random.choice(orders)
    target.insert(random.randint(0, len(target)), action)


def _change(orders: Orders, random: Random, change: Callable[[Any], Action]) -> None:
    """Changes one action, or one half of an overlap."""
    order, position = _choose(orders, random)
    action = order[position]
    if isinstance(action, Overlap):
        half = random.choice(["forward", "backward"])
        order[position] = replace(action, **{half: change(getattr(action, half))})
    else:
        order[position] = change(action)


def _change_stage(orders: Orders, random: Random) -> None:
    step = random.choice([-2, -1, 1, 2])

    def change(action: Any) -> Action:
        if not isinstance(action, Send | Recv):
            return replace(action, stage=action.stage + step)
        maker, taker, mb = action.message
        return replace(action, message=Message(maker + step, taker + step, mb))

    _change(orders, random, change)


def _change_microbatch(orders: Orders, random: Random) -> None:
    step = random.choice([-2, -1, 1, 2])

    def change(action: Any) -> Action:
        if isinstance(action, SHARDING_TYPES):
            return action
        if not isinstance(action, Send | Recv):
            return replace(action, mb=action.mb + step)
        return replace(action, message=action.message._replace(mb=action.mb + step))

    _change(orders, random, change)


def _change_type(orders: Orders, random: Random) -> None:
    order, position = _choose(orders, random)
    action = order[position]
    if isinstance(action, Overlap):
        order[position : position + 1] = [action.forward, action.backward]
    else:
        mb = 0 if isinstance(action, SHARDING_TYPES) else action.mb
        order[position] = random.choice(_SINGLE_TYPES)(action.stage, mb)


def _join(orders: Orders, random: Random) -> None:
    """Makes an overlap of a forward and a backward, next to each other if there are such."""
    order, _ = _choose(orders, random)
    forwards = [action for action in order if isinstance(action, Forward)]
    backwards = [action for action in order if isinstance(action, Backward | BackwardInput)]
    pairs = [
        (one, other) if isinstance(one, Forward) else (other, one)
        for one, other in pairwise(order)
        if (one in forwards and other in backwards) or (one in backwards and other in forwards)
    ]
    pairs = pairs or [(one, other) for one in forwards for other in backwards]
    if pairs:
        forward, backward = random.choice(pairs)
        order[order.index(backward)] = Overlap(forward, backward)
        order.remove(forward)


MUTATIONS: dict[str, Callable[[Orders, Random], None]] = {
    "drop": _drop,
    "duplicate": _duplicate,
    "swap neighbours": _swap_neighbours,
    "swap": _swap,
    "swap across ranks": _swap_across_ranks,
    "move": _move,
    "move across ranks": _move_across_ranks,
    "change stage": _change_stage,
    "change microbatch": _change_microbatch,
    "change type": _change_type,
    "join": _join,
}

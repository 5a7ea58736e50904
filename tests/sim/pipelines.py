"""Schedules and costs that the tests of the simulator share."""

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

from hypothesis import strategies as st

from penstock import CostTable, Placement, Schedule, schedules
from penstock.errors import ScheduleError
from penstock.ir import Action, Backward, BackwardInput, BackwardWeight, Forward
from penstock.ir.action import COMM_TYPES
from penstock.passes import Gathers, add_comms, add_gathers
from penstock.schedules import Shape

# Quarters add up without rounding, so that results can be compared bit for bit.
QUARTERS = st.integers(0, 40).map(lambda quarters: quarters / 4)


def trains(schedule: Schedule) -> bool:
    """Whether the schedule has backwards."""
    return any(not isinstance(action, Forward) for order in schedule.orders for action in order)


def uneven_costs(num_stages: int, **changes: float | Sequence[float]) -> CostTable:
    """Different costs for every stage and edge, all of them quarters."""
    stages, edges = range(num_stages), range(num_stages - 1)
    values: dict[str, float | Sequence[float]] = {
        "forward": [1 + stage % 3 / 4 for stage in stages],
        "backward_input": [1.5 + stage % 2 / 2 for stage in stages],
        "backward_weight": [0.75 + stage % 5 / 4 for stage in stages],
        "after_forward": [2 + stage % 3 for stage in stages],
        "after_input": [1 + stage % 2 / 2 for stage in stages],
        "delay": [0.25 + edge % 3 / 4 for edge in edges],
        "message_bytes": [1 + edge % 2 for edge in edges],
        "bandwidth": 4.0,
    }
    return CostTable(**{**values, **changes})  # type: ignore[arg-type]


@st.composite
def generated(draw: st.DrawFn) -> Schedule:
    """A schedule of some algorithm, small."""
    generator = draw(st.sampled_from(schedules.REGISTRY))
    p = draw(st.integers(1, 5))
    v = draw(st.integers(1, 3)) if generator.takes_any_stages_per_rank else None
    fewest = generator.min_microbatches(Shape(p, 1, v or generator.stages_per_rank))
    m = draw(st.integers(fewest, fewest + 5))
    return generator(num_ranks=p, num_microbatches=m, stages_per_rank=v)


@st.composite
def arbitrary(draw: st.DrawFn) -> Schedule:
    """A schedule on any placement, in any order that ranks could run it in."""
    num_ranks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
    placement = Placement(draw(st.permutations([*range(num_ranks), *extra])))
    m = draw(st.integers(1, 4))
    forward_only = draw(st.booleans())
    split = draw(st.lists(st.booleans(), min_size=m, max_size=m))
    random = draw(st.randoms(use_true_random=False))
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    # One microbatch's actions come in this order; W only has to come after its I.
    chains: list[list[Action]] = []
    weights: list[Action] = []
    for mb in range(m):
        stages = range(placement.num_stages)
        chain: list[Action] = [Forward(stage, mb) for stage in stages]
        if not forward_only:
            kind = BackwardInput if split[mb] else Backward
            chain += [kind(stage, mb) for stage in reversed(stages)]
        chains.append(chain[::-1])
    while any(chains) or weights:
        action = _next(chains, weights, random)
        orders[placement.ranks[action.stage]].append(action)
        if isinstance(action, BackwardInput):
            weights.append(BackwardWeight(action.stage, action.mb))
    return Schedule(orders, placement, m)


def _next(chains: list[list[Action]], weights: list[Action], random: Random) -> Action:
    options = [chain for chain in chains if chain]
    if weights and (not options or random.random() < 0.5):
        return weights.pop(random.randrange(len(weights)))
    return random.choice(options).pop()


@st.composite
def costs_of(draw: st.DrawFn, schedule: Schedule) -> CostTable:
    """Costs for each stage and edge; messages may take a channel's time on none, some or all."""

    def some(values: st.SearchStrategy[float], count: int) -> list[float]:
        return draw(st.lists(values, min_size=count, max_size=count))

    stages, edges = schedule.num_stages, schedule.num_stages - 1
    sizes = draw(st.sampled_from([st.just(0.0), st.sampled_from([0.0, 0.5, 1.0, 2.0, 8.0])]))
    return CostTable(
        forward=some(QUARTERS, stages),
        backward_input=some(QUARTERS, stages),
        backward_weight=some(QUARTERS, stages),
        backward=draw(st.none() | st.lists(QUARTERS, min_size=stages, max_size=stages)),
        after_forward=some(QUARTERS, stages),
        after_input=some(QUARTERS, stages),
        delay=some(QUARTERS, edges),
        message_bytes=some(sizes, edges),
        bandwidth=some(st.sampled_from([0.5, 1.0, 4.0]), edges),
        gather=some(QUARTERS, stages),
        reduce=some(QUARTERS, stages),
        gathered=some(QUARTERS, stages),
        overlap_saving=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        **draw(scales_of(schedule)),
    )


@st.composite
def scales_of(draw: st.DrawFn, schedule: Schedule) -> dict[str, Any]:
    """Scales of time, of memory, of both or of neither."""
    count = schedule.num_microbatches
    row = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=count, max_size=count)
    rows = st.lists(row, min_size=schedule.num_stages, max_size=schedule.num_stages)
    alike = st.just(())
    return {"time_scale": draw(alike | row | rows), "memory_scale": draw(alike | row)}


POLICIES = [
    Gathers.once(),
    Gathers.per_need(ahead=0),
    Gathers.per_need(ahead=2),
    Gathers.at_most(2),
]


@st.composite
def perhaps_gathered(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """The schedule as it is, or with some of its stages sharded."""
    policy = draw(st.sampled_from([None, *POLICIES]))
    if policy is None:
        return schedule
    stages = draw(st.sets(st.sampled_from(range(schedule.num_stages))))
    return add_gathers(schedule, policy, stages)


@st.composite
def with_comms(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """The schedule with communication, some of it posted earlier or sent later than need be."""
    schedule = add_comms(schedule)
    random = draw(st.randoms(use_true_random=False))
    for _ in range(draw(st.integers(0, 8))):
        orders = [list(order) for order in schedule.orders]
        order = random.choice(orders)
        moved = order.pop(random.randrange(len(order)))
        if isinstance(moved, COMM_TYPES):
            order.insert(random.randint(0, len(order)), moved)
            candidate = Schedule(orders, schedule.placement, schedule.num_microbatches)
            with suppress(ScheduleError):
                candidate.verify()
                schedule = candidate
    return schedule

"""An obvious simulation: every start time is pushed up until nothing has to wait any more.

Quadratic, and written from the documents alone; it shares no code with `penstock.sim.simulator`.
"""

from dataclasses import dataclass

from penstock import CostTable, Schedule
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Recv,
    ReduceGrads,
    Reshard,
    Send,
    Unshard,
)

# What an action waits for: whether it is a gradient, of which stage, and of which microbatch.
Awaited = tuple[bool, int, int]


@dataclass(frozen=True)
class Times:
    """When each action starts and ends, by rank and position."""

    starts: list[list[float]]
    ends: list[list[float]]


def simulate_by_relaxation(schedule: Schedule, costs: CostTable, *, blocking: bool) -> Times:
    """The times of all actions of a schedule that is free of deadlock."""
    starts = [[0.0] * len(order) for order in schedule.orders]
    ends = [[0.0] * len(order) for order in schedule.orders]
    while True:
        arrivals = _arrivals(schedule, costs, ends, starts)
        before = [list(row) for row in starts], [list(row) for row in ends]
        for rank, order in enumerate(schedule.orders):
            free, lane = 0.0, 0.0
            gathered: dict[int, float] = {}
            for position, action in enumerate(order):
                if isinstance(action, Unshard | ReduceGrads | Reshard):
                    is_gather = isinstance(action, Unshard)
                    if isinstance(action, Reshard):
                        start = end = max(free, gathered[action.stage])
                    else:
                        start = max(free, lane)
                        lengths = costs.gather if is_gather else costs.reduce
                        lane = end = start + lengths[action.stage]
                    if is_gather:
                        gathered[action.stage] = end
                    starts[rank][position], ends[rank][position] = start, end
                    free = end if blocking else free
                    continue
                awaited = _needs(action, schedule)
                start = max([free, *(arrivals[message] for message in awaited)])
                for part in _parts(action):
                    if isinstance(part, Forward | Backward | BackwardInput):
                        start = max(start, gathered.get(part.stage, 0.0))
                end = start + _length(action, costs)
                if blocking and isinstance(action, Recv):
                    end = max(start, arrivals[_received(action)])
                if blocking and isinstance(action, Send):
                    end = arrivals[_sent(action)]
                starts[rank][position], ends[rank][position] = start, end
                free = end
        if before == (starts, ends):
            return Times(starts, ends)


def _arrivals(
    schedule: Schedule, costs: CostTable, ends: list[list[float]], starts: list[list[float]]
) -> dict[Awaited, float]:
    """When each message is there, if the actions that make them end at `ends`."""
    ranks = schedule.placement.ranks
    arrivals: dict[Awaited, float] = {}
    channel_free: dict[tuple[int, int], float] = {}
    last_arrival: dict[tuple[int, int], float] = {}
    for rank, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            for gradient, stage, mb in _makes(action, schedule):
                source = stage + 1 if gradient else stage - 1
                edge = min(source, stage)
                # A send starts its message when it starts; it ends later if it blocks.
                is_send = isinstance(action, Send)
                time = (starts if is_send else ends)[rank][position]
                if ranks[source] != ranks[stage]:
                    channel = ranks[source], ranks[stage]
                    time = max(time, channel_free.get(channel, 0.0))
                    time += costs.message_bytes[edge] / costs.bandwidth[edge] * _size(costs, mb)
                    channel_free[channel] = time
                    time = max(time + costs.delay[edge], last_arrival.get(channel, 0.0))
                    last_arrival[channel] = time
                arrivals[gradient, stage, mb] = time
    return arrivals


def _parts(action: Action) -> list[Action]:
    return [action.forward, action.backward] if isinstance(action, Overlap) else [action]


def _needs(action: Action, schedule: Schedule) -> list[Awaited]:
    needs: list[Awaited] = []
    for part in _parts(action):
        if isinstance(part, Forward) and part.stage > 0:
            needs.append((False, part.stage, part.mb))
        if isinstance(part, Backward | BackwardInput) and part.stage < schedule.num_stages - 1:
            needs.append((True, part.stage, part.mb))
    return needs


def _makes(action: Action, schedule: Schedule) -> list[Awaited]:
    """The messages that leave with `action`: with the send, if another rank waits for it."""
    ranks = schedule.placement.ranks
    makes: list[Awaited] = []
    for part in _parts(action):
        match part:
            case Forward(stage=stage, mb=mb) if stage < schedule.num_stages - 1:
                if not schedule.has_comms or ranks[stage] == ranks[stage + 1]:
                    makes.append((False, stage + 1, mb))
            case Backward(stage=stage, mb=mb) | BackwardInput(stage=stage, mb=mb) if stage > 0:
                if not schedule.has_comms or ranks[stage] == ranks[stage - 1]:
                    makes.append((True, stage - 1, mb))
            case Send():
                makes.append(_sent(part))
    return makes


def _sent(send: Send) -> Awaited:
    return (send.message.is_gradient, send.message.taker, send.mb)


def _received(receive: Recv) -> Awaited:
    return (receive.message.is_gradient, receive.stage, receive.mb)


def _size(costs: CostTable, mb: int) -> float:
    return costs.memory_scale[mb] if costs.memory_scale else 1.0


def _length(action: Action, costs: CostTable) -> float:
    match action:
        case Forward(stage=stage, mb=mb):
            return costs.forward[stage] * _pace(costs, stage, mb)
        case Backward(stage=stage, mb=mb):
            return costs.backward[stage] * _pace(costs, stage, mb)
        case BackwardInput(stage=stage, mb=mb):
            return costs.backward_input[stage] * _pace(costs, stage, mb)
        case BackwardWeight(stage=stage, mb=mb):
            return costs.backward_weight[stage] * _pace(costs, stage, mb)
        case Overlap(forward=forward, backward=backward):
            longer, shorter = sorted(
                (_length(forward, costs), _length(backward, costs)), reverse=True
            )
            return longer + (1 - costs.overlap_saving) * shorter
        case _:
            return 0.0


def _pace(costs: CostTable, stage: int, mb: int) -> float:
    return costs.time_scale[stage][mb] if costs.time_scale else 1.0

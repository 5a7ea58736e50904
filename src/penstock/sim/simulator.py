"""Compute when every action starts and ends.

The orders are fixed, so an action starts when its rank is free and its inputs have arrived.
Along a walk both are known, and nothing is left to decide: there are no ties to break.

Gathers and reductions run on a lane of their own beside the computes of a rank, one after another:

    rank 0  computes     [0F0     ][0F1     ][ waits ][1F0     ]
            collectives  [gather 1                   ]
"""

from penstock.costs import CostTable
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Rank,
    Recompute,
    Recv,
    ReduceGrads,
    Schedule,
    Send,
    StageId,
    Unshard,
)
from penstock.ir.action import SHARDING_TYPES, Sharding, gathered_stages
from penstock.ir.dataflow import Dataflow
from penstock.ir.message import Channel, Message
from penstock.ir.walking import walk
from penstock.passes import add_comms
from penstock.passes.held_memory import check_stages, whole_shares
from penstock.passes.verification import check_orders
from penstock.timeline import Report, Timeline
from penstock.timeline.bubble_report import make_report


def simulate(
    schedule: Schedule,
    costs: CostTable | None = None,
    *,
    blocking: bool = False,
) -> Report:
    """Simulate `schedule` under `costs`: compute when every action starts and ends.

    This also verifies the schedule. Without `costs`, each rank's share of F, I and W takes 1 each,
    messages take no time, and a microbatch holds 1 of memory on a rank.
    Communication overlaps compute. If `blocking`, it does not: a send keeps its rank busy until the
    message has arrived, a receive waits for it, and a rank waits for its gathers and reductions.

    >>> from penstock import schedules
    >>> schedule = schedules.get("ZB-H2")(num_ranks=4, num_microbatches=8)
    >>> simulate(schedule)
    Report(makespan=27, span=24, bubble_by_makespan=0.1111, bubble_by_span=0.0000, peak_memory=7)
    """
    check_orders(schedule)  # The rest of `verify` is a walk, and so is the simulation.
    if costs is None:
        costs = _unit_costs(schedule)
    check_stages(schedule, costs)
    if blocking and not schedule.has_comms:
        schedule = add_comms(schedule)
    return make_report(run(schedule, costs, blocking=blocking), costs)


def duration(action: Action, costs: CostTable) -> float:
    """Return the time that `action` keeps its rank from computing, unless communication blocks."""
    if isinstance(action, Forward):
        time = costs.forward[action.stage]
    elif isinstance(action, Backward):
        time = costs.backward[action.stage]
    elif isinstance(action, BackwardInput):
        time = costs.backward_input[action.stage]
    elif isinstance(action, BackwardWeight):
        time = costs.backward_weight[action.stage]
    elif isinstance(action, Recompute):
        time = costs.recompute[action.stage]
    elif isinstance(action, Overlap):
        halves = duration(action.forward, costs), duration(action.backward, costs)
        return sum(halves) - costs.overlap_saving * min(halves)
    else:
        return 0.0
    return time * costs.time_scale[action.stage][action.mb] if costs.time_scale else time


def run(schedule: Schedule, costs: CostTable, *, blocking: bool = False) -> Timeline:
    """Return the timeline of a schedule whose orders have been checked.

    Communication overlaps compute, and only the action that needs a message waits for it.
    If `blocking`, a send keeps its rank busy until the message has arrived, and a receive waits
    for it; the schedule must then have communication.
    """
    network = _Network(schedule, costs)
    collectives = _Collectives(schedule, costs)
    arrivals: dict[Message, float] = {}
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    free = [0.0] * schedule.num_ranks
    for rank, action, needed, delivered in walk(schedule, blocking=blocking):
        if isinstance(action, SHARDING_TYPES):
            start, end = collectives.run(rank, action, free[rank])
            starts[rank].append(start)
            ends[rank].append(end)
            if blocking:
                free[rank] = end
            continue
        start = collectives.wait(action, free[rank]) if schedule.has_sharding else free[rank]
        for key in needed:
            arrival = arrivals[key]
            if arrival > start:
                start = arrival
        end = start + duration(action, costs)
        for key in delivered:
            arrivals[key] = network.send(key, end)
            if blocking and isinstance(action, Send):
                end = arrivals[key]
        if blocking and isinstance(action, Recv):
            start = free[rank]  # Its wait is part of it, as in a send.
        free[rank] = end
        starts[rank].append(start)
        ends[rank].append(end)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


class _Network:
    """The cost of messages on each edge, and the times of the last message on each channel."""

    def __init__(self, schedule: Schedule, costs: CostTable) -> None:
        self._flow = Dataflow(schedule)
        self._delays, self._transfers = costs.delay, costs.transfer
        self._scales = costs.memory_scale
        # Messages that take the same time cannot delay each other.
        self._can_queue = any(costs.transfer) or len(set(costs.delay)) > 1
        self._free_at: dict[Channel, float] = {}
        self._last_arrival: dict[Channel, float] = {}

    def send(self, message: Message, time: float) -> float:
        """Return when a message sent at `time` arrives; the messages of a channel stay in order."""
        if not self._flow.is_sent(message):
            return time
        delay, transfer = self._cost(message)
        if not self._can_queue:
            return time + delay
        if self._scales:
            transfer *= self._scales[message.mb]
        channel = self._flow.channel(message)
        free_at = max(time, self._free_at.get(channel, 0.0)) + transfer
        arrival = max(free_at + delay, self._last_arrival.get(channel, 0.0))
        self._free_at[channel] = free_at
        self._last_arrival[channel] = arrival
        return arrival

    def _cost(self, message: Message) -> tuple[float, float]:
        """Return the delay and the transfer of an edge, or of the slowest edge that is skipped."""
        skip = message.skip
        if skip is None:
            return self._delays[message.edge], self._transfers[message.edge]
        passed = slice(skip.source, skip.target)
        return max(self._delays[passed]), max(self._transfers[passed])


class _Collectives:
    """The times of gathers and reductions, which run beside the computes of their rank."""

    def __init__(self, schedule: Schedule, costs: CostTable) -> None:
        self._costs = costs
        self._free_at = [0.0] * schedule.num_ranks
        self._gathered_at: dict[StageId, float] = {}

    def run(self, rank: Rank, action: Sharding, issued: float) -> tuple[float, float]:
        """Return when an action that is issued at a time starts and ends."""
        stage = action.stage
        if isinstance(action, Unshard):
            length = self._costs.gather[stage]
        elif isinstance(action, ReduceGrads):
            length = self._costs.reduce[stage]
        else:  # A free takes no time, but the gather must have ended.
            time = max(issued, self._gathered_at[stage])
            return time, time
        start = max(issued, self._free_at[rank])
        end = self._free_at[rank] = start + length
        if isinstance(action, Unshard):
            self._gathered_at[stage] = end
        return start, end

    def wait(self, action: Action, time: float) -> float:
        """Return when the stages that a compute needs are gathered, but not before `time`."""
        return max([time, *(self._gathered_at.get(s, 0.0) for s in gathered_stages(action))])


def _unit_costs(schedule: Schedule) -> CostTable:
    share = whole_shares(schedule).after_forward
    return CostTable(
        forward=share,
        backward_input=share,
        backward_weight=share,
        after_forward=share,
        after_input=share,
    )

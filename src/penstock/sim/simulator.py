"""Computes when every action starts and ends.

The orders are fixed, so an action starts when its rank is free and its inputs have arrived.
Along a walk both are known, and nothing is left to decide: the result depends on no tie.
"""

from penstock.costs import CostTable
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Recv,
    Schedule,
    Send,
)
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
    """Computes when every action of `schedule` starts and ends, and what follows from it.

    Verifies the schedule too. Without `costs`, each rank's share of F, I and W takes 1 each,
    messages take no time, and a microbatch holds 1 of memory on a rank.
    Communication overlaps compute. If `blocking`, it does not: a send keeps its rank until the
    message has arrived, and a receive waits for it.

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
    """How long `action` keeps its rank; communication that overlaps keeps it no time."""
    if isinstance(action, Forward):
        return costs.forward[action.stage]
    if isinstance(action, Backward):
        return costs.backward[action.stage]
    if isinstance(action, BackwardInput):
        return costs.backward_input[action.stage]
    if isinstance(action, BackwardWeight):
        return costs.backward_weight[action.stage]
    if isinstance(action, Overlap):
        halves = duration(action.forward, costs), duration(action.backward, costs)
        return sum(halves) - costs.overlap_saving * min(halves)
    return 0.0


def run(schedule: Schedule, costs: CostTable, *, blocking: bool = False) -> Timeline:
    """The timeline of a schedule whose orders have been checked.

    Communication overlaps compute, and only who needs a message waits for it.
    If `blocking`, a send keeps its rank until the message has arrived, and a receive waits for it;
    the schedule must then have communication.
    """
    network = _Network(schedule, costs)
    arrivals: dict[Message, float] = {}
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    free = [0.0] * schedule.num_ranks
    for rank, action, needed, delivered in walk(schedule, blocking=blocking):
        start = free[rank]
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
            start = free[rank]  # What it waits is part of it, as of a send.
        free[rank] = end
        starts[rank].append(start)
        ends[rank].append(end)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


class _Network:
    """What messages cost on each edge, and what the last one on each channel left behind."""

    def __init__(self, schedule: Schedule, costs: CostTable) -> None:
        self._flow = Dataflow(schedule)
        self._delays, self._transfers = costs.delay, costs.transfer
        # Messages that take the same time cannot get into each other's way.
        self._can_queue = any(costs.transfer) or len(set(costs.delay)) > 1
        self._free_at: dict[Channel, float] = {}
        self._last_arrival: dict[Channel, float] = {}

    def send(self, message: Message, time: float) -> float:
        """When a message arrives that is sent at `time`; those of a channel stay in order."""
        if not self._flow.is_sent(message):
            return time
        delay, transfer = self._cost(message)
        if not self._can_queue:
            return time + delay
        channel = self._flow.channel(message)
        free_at = max(time, self._free_at.get(channel, 0.0)) + transfer
        arrival = max(free_at + delay, self._last_arrival.get(channel, 0.0))
        self._free_at[channel] = free_at
        self._last_arrival[channel] = arrival
        return arrival

    def _cost(self, message: Message) -> tuple[float, float]:
        """The delay and the transfer of an edge, or of the slowest of those that are skipped."""
        skip = message.skip
        if skip is None:
            return self._delays[message.edge], self._transfers[message.edge]
        passed = slice(skip.source, skip.target)
        return max(self._delays[passed]), max(self._transfers[passed])


def _unit_costs(schedule: Schedule) -> CostTable:
    share, _ = whole_shares(schedule)
    return CostTable(
        forward=share,
        backward_input=share,
        backward_weight=share,
        after_forward=share,
        after_input=share,
    )

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
    Schedule,
)
from penstock.ir.action import RECV_TYPES, SEND_TYPES
from penstock.ir.inputs import Channel, Input, Inputs
from penstock.ir.walking import walk
from penstock.passes import add_comms
from penstock.passes.held_memory import check_stages, whole_shares
from penstock.passes.verification import check_orders
from penstock.timeline import Report, Timeline
from penstock.timeline.report import make_report


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
    arrivals: dict[Input, float] = {}
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
            if blocking and isinstance(action, SEND_TYPES):
                end = arrivals[key]
        if blocking and isinstance(action, RECV_TYPES):
            start = free[rank]  # What it waits is part of it, as of a send.
        free[rank] = end
        starts[rank].append(start)
        ends[rank].append(end)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


class _Network:
    """What messages cost on each edge, and what the last one on each channel left behind."""

    def __init__(self, schedule: Schedule, costs: CostTable) -> None:
        self._inputs = Inputs(schedule)
        # As `Inputs.edge` numbers them: down to each stage, and up to each stage.
        self._delays = (0.0, *costs.delay, *costs.delay, 0.0)
        self._transfers = (0.0, *costs.transfer, *costs.transfer, 0.0)
        # Messages that take the same time cannot get into each other's way.
        self._can_queue = any(costs.transfer) or len(set(costs.delay)) > 1
        self._free_at: dict[Channel, float] = {}
        self._last_arrival: dict[Channel, float] = {}

    def send(self, key: Input, time: float) -> float:
        """When an input arrives that is sent at `time`; messages of a channel stay in order."""
        if not self._inputs.is_message(key):
            return time
        edge = self._inputs.edge(key)
        if not self._can_queue:
            return time + self._delays[edge]
        channel = self._inputs.channel(key)
        free_at = max(time, self._free_at.get(channel, 0.0)) + self._transfers[edge]
        arrival = max(free_at + self._delays[edge], self._last_arrival.get(channel, 0.0))
        self._free_at[channel] = free_at
        self._last_arrival[channel] = arrival
        return arrival


def _unit_costs(schedule: Schedule) -> CostTable:
    share, _ = whole_shares(schedule)
    return CostTable(
        forward=share,
        backward_input=share,
        backward_weight=share,
        after_forward=share,
        after_input=share,
    )

"""Computes when every action starts and ends.

The orders are fixed, so an action starts when its rank is free and its inputs have arrived.
Along a walk both are known, and nothing is left to decide: the result depends on no tie.
"""

from dataclasses import dataclass

from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Rank,
    Schedule,
    SendActivation,
    SendGradient,
    StageId,
)
from penstock.ir.walk import Inputs, walk
from penstock.sim.cost import CostTable


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """When each action starts and ends: `starts[rank][position]`, in step with the orders."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]


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
    """The timeline of a verified schedule.

    Communication overlaps compute, and only who needs a message waits for it.
    If `blocking`, a send keeps its rank until the message has arrived, and a receive waits for it;
    the schedule must then have communication.
    """
    inputs = Inputs(schedule)
    network = _Network(schedule, costs)
    arrivals: dict[int, float] = {}
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    free = [0.0] * schedule.num_ranks
    for rank, action, needed, delivered in walk(schedule, blocking=blocking):
        start = free[rank]
        for key in needed:
            start = max(start, arrivals[key])
        end = start + duration(action, costs)
        for key in delivered:
            gradient, stage, _ = inputs.describe(key)
            arrivals[key] = network.send(end, gradient=gradient, stage=stage)
            if blocking and isinstance(action, SendActivation | SendGradient):
                end = arrivals[key]
        free[rank] = end
        starts[rank].append(start)
        ends[rank].append(end)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


class _Network:
    """The channels of one run, and until when each is busy."""

    def __init__(self, schedule: Schedule, costs: CostTable) -> None:
        self._ranks = schedule.placement.ranks
        self._delay = costs.delay
        self._transfer = costs.transfer
        self._busy_until: dict[tuple[Rank, Rank], float] = {}

    def send(self, time: float, *, gradient: bool, stage: StageId) -> float:
        """When an input of `stage` arrives that was sent at `time`."""
        edge = stage if gradient else stage - 1
        channel = self._ranks[stage + 1 if gradient else edge], self._ranks[stage]
        if channel[0] == channel[1]:
            return time
        if self._transfer[edge] > 0:
            time = max(time, self._busy_until.get(channel, 0.0)) + self._transfer[edge]
            self._busy_until[channel] = time
        return time + self._delay[edge]

"""Ranks and links that have become slower than planned, and what that costs.

Each rank compares the times of its actions with the plan. What a slow rank or link costs is
simulated: the schedule with its new times, and all others as planned. So one that nobody waits for
is not named.
"""

import socket
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from penstock.costs import CostTable
from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Rank,
    Recompute,
    Schedule,
    StageId,
)
from penstock.ir.action import SingleCompute, compute_parts
from penstock.runtime.measuring.action_times import Meter
from penstock.runtime.measuring.measuring_steps import receipt_s
from penstock.runtime.measuring.message_times import Edge
from penstock.sim import simulate
from penstock.sim.simulator import duration

_MOST_NAMED = 8
"""The most slow ranks that are named at once."""
LEAST_S = 1e-3
"""What costs a step less than this is not worth a line in the log."""

_FIELDS: dict[type[SingleCompute], str] = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "backward_input",
    BackwardWeight: "backward_weight",
    Recompute: "recompute",
}
_WORDS = {
    "forward": "forwards",
    "backward": "backwards",
    "backward_input": "input backwards",
    "backward_weight": "weight backwards",
    "recompute": "recomputations",
}
Part: TypeAlias = tuple[str, StageId]
"""A kind of action, as a field of a cost table, and its stage."""


class Change(NamedTuple):
    """The times of one part of a rank's work, compared with the plan."""

    ratio: float
    """The median of measured ÷ planned."""
    planned_s: float
    """The planned time of all its actions in a step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, and the costs that are expected of it."""

    schedule: Schedule
    costs: CostTable
    receipts_s: Mapping[int, float]
    """For each edge of this rank, the time to take a message that has arrived."""
    step_s: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_s", simulate(self.schedule, self.costs).makespan)

    def stage_times(self, rank: Rank) -> dict[StageId, float]:
        """Return the seconds that each stage of a rank takes in a step."""
        found: defaultdict[StageId, float] = defaultdict(float)
        for action in self.schedule.orders[rank]:
            for part in compute_parts(action):
                found[part.stage] += duration(part, self.costs)
        return dict(found)


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The times of one rank in some steps, compared with the plan."""

    host: str
    changes: dict[Part, Change]
    step_s: float
    """The median time of its steps."""

    @classmethod
    def of(
        cls, steps: Sequence[tuple[Meter, CostTable]], receipts_s: Mapping[int, float]
    ) -> "RankTimes":
        """Compare steps with the costs that were planned for their microbatches."""
        ratios: defaultdict[Part, list[float]] = defaultdict(list)
        planned_s: defaultdict[Part, float] = defaultdict(float)
        for meter, costs in steps:
            for action, timing in meter.timings.items():
                expected_s = duration(action, costs)
                if expected_s > 0:
                    part = _FIELDS[type(action)], action.stage
                    ratios[part].append(timing.cost_s(receipt_s(action, receipts_s)) / expected_s)
                    planned_s[part] += expected_s / len(steps)
        changes = {
            part: Change(statistics.median(found), planned_s[part])
            for part, found in ratios.items()
        }
        step_s = statistics.median(meter.ended_s - meter.began_s for meter, _ in steps)
        return cls(socket.gethostname(), changes, step_s)

    @property
    def drift(self) -> float:
        """The largest share by which the time of a stage has changed, in either direction."""
        found = self.stage_times
        planned: defaultdict[StageId, float] = defaultdict(float)
        for (_, stage), change in self.changes.items():
            planned[stage] += change.planned_s
        return max((abs(found[stage] / planned[stage] - 1) for stage in found), default=0.0)

    @property
    def stage_times(self) -> dict[StageId, float]:
        """The seconds that each stage takes in a step."""
        found: defaultdict[StageId, float] = defaultdict(float)
        for (_, stage), change in self.changes.items():
            found[stage] += change.ratio * change.planned_s
        return dict(found)

    def slowest(self, share: float) -> Part | None:
        """Return the part that takes longer by more than the share, and has lost most by it."""
        slow = [part for part, change in self.changes.items() if change.ratio > 1 + share]
        return max(slow, key=self.lost_s, default=None)

    def lost_s(self, part: Part) -> float:
        """Return the time that a part takes longer than planned, in a step."""
        return (self.changes[part].ratio - 1) * self.changes[part].planned_s


@dataclass(frozen=True, slots=True)
class Slow:
    """A slow rank or link, and what it costs."""

    who: str
    what: str
    lost_s: float
    """The time by which it makes a step longer, in the simulator."""
    step_s: float
    """The planned time of a step."""

    def __str__(self) -> str:
        return (
            f"{self.who} {self.what}; the step takes {self.lost_s / self.step_s:.0%} longer "
            f"({self.lost_s * 1e3:.4g} ms)"
        )


def changed_costs(costs: CostTable, ranks: Iterable[RankTimes]) -> CostTable:
    """Return the planned costs with what these ranks have measured."""
    fields: dict[str, Any] = {name: list(getattr(costs, name)) for name in _WORDS}
    for rank in ranks:
        for (name, stage), change in rank.changes.items():
            fields[name][stage] *= change.ratio
    return replace(costs, **fields)


def find_slow_ranks(plan: Plan, ranks: Sequence[RankTimes], share: float) -> dict[Rank, Slow]:
    """Return the ranks that are slower than planned by more than the share, if that costs time."""
    found: dict[Rank, Slow] = {}
    slow = [
        (times.lost_s(part), rank, part)
        for rank, times in enumerate(ranks)
        if (part := times.slowest(share)) is not None
    ]
    # All ranks wait meanwhile, and on many ranks a simulation takes long.
    for _, rank, part in sorted(slow, reverse=True, key=lambda one: one[0])[:_MOST_NAMED]:
        times = ranks[rank]
        now_s = simulate(plan.schedule, changed_costs(plan.costs, [times])).makespan
        if now_s - plan.step_s >= LEAST_S:
            kind, stage = part
            what = (
                f"takes {times.changes[part].ratio:.1f} times as long as planned in the "
                f"{_WORDS[kind]} of stage {stage}"
            )
            who = f"rank {rank} (host {times.host})"
            found[rank] = Slow(who, what, now_s - plan.step_s, plan.step_s)
    return found


def find_slow_links(
    plan: Plan, hosts: Sequence[str], edges: Mapping[int, Edge], share: float
) -> dict[tuple[Rank, Rank], Slow]:
    """Return the links that are slower than planned by more than the share, if that costs time."""
    found: dict[tuple[Rank, Rank], Slow] = {}
    for number, edge in sorted(edges.items()):
        planned_s, delay_s = plan.costs.delay[number], edge.cost.delay
        if delay_s <= planned_s * (1 + share):
            continue
        delays = list(plan.costs.delay)
        delays[number] = delay_s
        now_s = simulate(plan.schedule, replace(plan.costs, delay=tuple(delays))).makespan
        if now_s - plan.step_s >= LEAST_S:
            ends = plan.schedule.placement.ranks[number : number + 2]
            one, other = (f"rank {rank} (host {hosts[rank]})" for rank in ends)
            what = (
                f"takes {delay_s * 1e3:.3g} ms for a message between stages {number} and "
                f"{number + 1}, {planned_s * 1e3:.3g} ms as planned"
            )
            link = min(ends), max(ends)
            who = f"the link between {one} and {other}"
            slow = Slow(who, what, now_s - plan.step_s, plan.step_s)
            if link not in found or slow.lost_s > found[link].lost_s:
                found[link] = slow
    return found

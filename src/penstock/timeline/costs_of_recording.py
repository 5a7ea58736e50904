"""The costs of stages, from recorded timelines of one schedule."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

from penstock.costs.cost_table import CostTable
from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    MicrobatchId,
    Recompute,
    ReduceGrads,
    Schedule,
    StageId,
    Unshard,
)
from penstock.ir.action import SHARDING_TYPES, Sharding, SingleCompute, recomputed_by
from penstock.ir.dataflow import Dataflow
from penstock.ir.message import Message
from penstock.ir.walking import walk
from penstock.passes.held_memory import EvenFootprint, Held, whole_shares
from penstock.timeline.timeline import Timeline

_Times: TypeAlias = dict[tuple[type, StageId], float]
_SMALLEST_SCALE = 1e-6  # Of a microbatch that took no time at all.


class _Dropping:
    """The kind of a forward that is recomputed."""


def recorded_costs(
    schedule: Schedule,
    timelines: Sequence[Timeline],
    memory: Sequence[Sequence[Held]] = (),
    *,
    by_microbatch: bool = False,
) -> CostTable:
    """Return medians over all microbatches of these timelines.

    With `by_microbatch`, a microbatch has its own share of them as its scale. If the halves of
    a backward never ran, each is taken to be half of it. If no forward ran again, that is taken to
    be as long as a forward, and to have kept all; if all of them did, a forward is taken to keep
    what was held after the second. If no memory was measured at the actions of the schedule, a
    microbatch holds 1 on a rank.
    """
    times = _median_times(timelines)
    stages = range(schedule.num_stages)
    half = {stage: times.get((Backward, stage), 0.0) / 2 for stage in stages}
    inputs = [times.get((BackwardInput, stage), half[stage]) for stage in stages]
    weights = [times.get((BackwardWeight, stage), half[stage]) for stage in stages]
    scales = _memory_scale(schedule, memory) if by_microbatch and memory else ()
    footprint = _footprint(schedule, memory, scales) if memory else whole_shares(schedule)
    return CostTable(
        forward=[times[Forward, stage] for stage in stages],
        backward_input=inputs,
        backward_weight=weights,
        backward=[times.get((Backward, stage), inputs[stage] + weights[stage]) for stage in stages],
        **footprint._asdict(),
        delay=_delays(schedule, timelines),
        gather=[times.get((Unshard, stage), 0.0) for stage in stages],
        reduce=[times.get((ReduceGrads, stage), 0.0) for stage in stages],
        time_scale=_time_scale(schedule, timelines, times) if by_microbatch else (),
        recompute=[times.get((Recompute, stage), times[Forward, stage]) for stage in stages],
    )


def _median_times(timelines: Sequence[Timeline]) -> _Times:
    """Return the median time of each kind of action on each stage."""
    found: defaultdict[tuple[type, StageId], list[float]] = defaultdict(list)
    for action, time in _timed(timelines):
        found[type(action), action.stage].append(time)
    return {key: statistics.median(values) for key, values in found.items()}


def _timed(timelines: Sequence[Timeline]) -> Iterator[tuple[SingleCompute | Sharding, float]]:
    """Yield each action with the time that it took."""
    for timeline in timelines:
        for rank, order in enumerate(timeline.schedule.orders):
            spans = zip(order, timeline.starts[rank], timeline.ends[rank], strict=True)
            for action, start, end in spans:
                # Recordings have no overlaps and no communication: each half ran by itself.
                yield cast(SingleCompute | Sharding, action), end - start


def _time_scale(
    schedule: Schedule, timelines: Sequence[Timeline], usual: _Times
) -> list[list[float]]:
    """Return by stage and microbatch how long its actions took, as a multiple of the medians."""
    found: defaultdict[tuple[type, StageId, MicrobatchId], list[float]] = defaultdict(list)
    for action, time in _timed(timelines):
        if not isinstance(action, SHARDING_TYPES):
            found[type(action), action.stage, action.mb].append(time)
    took, wanted = (
        defaultdict[tuple[int, int], float](float),
        defaultdict[tuple[int, int], float](float),
    )
    for (kind, stage, mb), times in found.items():
        took[stage, mb] += statistics.median(times)
        wanted[stage, mb] += usual[kind, stage]
    return [
        [_ratio(took[stage, mb], wanted[stage, mb]) for mb in range(schedule.num_microbatches)]
        for stage in range(schedule.num_stages)
    ]


def _memory_scale(schedule: Schedule, memory: Sequence[Sequence[Held]]) -> tuple[float, ...]:
    """Return by microbatch what its forwards left on all stages, as a multiple of the medians.

    If a forward is recomputed, that is what is held afterwards.
    """
    found: defaultdict[StageId, defaultdict[MicrobatchId, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for action, net, _ in _measured(schedule, memory):
        if isinstance(action, Forward | Recompute):
            found[action.stage][action.mb] += max(0.0, net)
    usual = sum(statistics.median(of_stage.values()) for of_stage in found.values())
    return tuple(
        _ratio(sum(of_stage[mb] for of_stage in found.values()), usual)
        for mb in range(schedule.num_microbatches)
    )


def _ratio(value: float, usual: float) -> float:
    """Return a positive multiple; 1 if there is nothing to compare with."""
    return max(_SMALLEST_SCALE, value / usual) if usual > 0 else 1.0


def _measured(
    schedule: Schedule, memory: Sequence[Sequence[Held]]
) -> Iterator[tuple[SingleCompute | Sharding, float, float]]:
    """Yield each action with what it left held and needed, beyond what was held before it."""
    for order, levels in zip(schedule.orders, memory, strict=True):
        before = 0.0
        for action, level in zip(order, levels, strict=True):
            rise = max(0.0, level.during - before)
            yield cast(SingleCompute | Sharding, action), level.after - before, rise
            before = level.after


def _footprint(
    schedule: Schedule, memory: Sequence[Sequence[Held]], scales: tuple[float, ...]
) -> EvenFootprint:
    """Return what the actions of each stage held and needed, as those of a microbatch of scale 1.

    What microbatches hold is a median, and what actions need is the most. What never ran is assumed
    to need as much as what ran in its place: halves as the full backward, a forward as its
    recomputation.
    """
    nets: defaultdict[tuple[type, StageId], list[float]] = defaultdict(list)
    rises: defaultdict[tuple[type, StageId], list[float]] = defaultdict(list)
    recomputed = frozenset[tuple[StageId, MicrobatchId]]().union(
        *map(recomputed_by, schedule.orders)
    )
    for action, net_bytes, rise in _measured(schedule, memory):
        scale = 1.0
        if scales and not isinstance(action, SHARDING_TYPES):
            scale = scales[action.mb]
        drops = isinstance(action, Forward) and (action.stage, action.mb) in recomputed
        kind = _Dropping if drops else type(action)
        nets[kind, action.stage].append(net_bytes / scale)
        rises[kind, action.stage].append(rise / scale)

    def needs(kind: type, stage: StageId) -> float:
        return max(rises[kind, stage], default=0.0)

    def net(kind: type, stage: StageId) -> float:
        return statistics.median(nets[kind, stage] or [0.0])

    stages = range(schedule.num_stages)
    dropped = [max(0.0, net(_Dropping, stage)) for stage in stages]
    kept = [
        max(0.0, net(Forward, s) if nets[Forward, s] else dropped[s] + net(Recompute, s))
        for s in stages
    ]
    left = [max(0.0, kept[stage] + net(BackwardInput, stage)) for stage in stages]
    halves = [max(needs(BackwardInput, s), needs(BackwardWeight, s)) for s in stages]
    return EvenFootprint(
        after_forward=tuple(kept),
        after_input=tuple(left),
        during_forward=tuple(needs(Forward, s) or dropped[s] + needs(Recompute, s) for s in stages),
        during_input=tuple(needs(BackwardInput, s) or needs(Backward, s) for s in stages),
        during_weight=tuple(needs(BackwardWeight, s) or needs(Backward, s) for s in stages),
        during_backward=tuple(needs(Backward, s) or halves[s] for s in stages),
        gathered=(0.0,) * schedule.num_stages,
        after_dropping=tuple(
            min(kept[s], dropped[s]) if nets[_Dropping, s] else kept[s] for s in stages
        ),
        during_dropping=tuple(needs(_Dropping, s) or needs(Forward, s) for s in stages),
        during_recompute=tuple(needs(Recompute, s) or needs(Forward, s) for s in stages),
        memory_scale=scales,
    )


def _delays(schedule: Schedule, timelines: Sequence[Timeline]) -> list[float]:
    """Return each edge's median delay of messages whose receiver was already waiting.

    It is the mean of both directions, so that an error between two clocks cancels out.
    """
    flow = Dataflow(schedule)
    found: defaultdict[tuple[int, bool], list[float]] = defaultdict(list)
    for timeline in timelines:
        made: dict[Message, float] = {}
        position = [0] * schedule.num_ranks
        free = [0.0] * schedule.num_ranks
        for rank, action, needed, delivered in walk(schedule):
            place = position[rank]
            position[rank] += 1
            if isinstance(action, SHARDING_TYPES):
                continue  # They run beside the computes of the rank.
            start, end = timeline.starts[rank][place], timeline.ends[rank][place]
            was_free, free[rank] = free[rank], end
            for message in filter(flow.is_sent, needed):
                # If the rank was busy when the message was made, the delay cannot be seen.
                if made[message] >= was_free:
                    found[message.edge, message.is_gradient].append(start - made[message])
            made |= dict.fromkeys(delivered, end)
    delays = []
    for edge in range(schedule.num_stages - 1):
        ways = [found[edge, is_gradient] for is_gradient in (False, True)]
        medians = [statistics.median(seen) for seen in ways if seen]
        delays.append(max(0.0, statistics.fmean(medians)) if medians else 0.0)
    return delays

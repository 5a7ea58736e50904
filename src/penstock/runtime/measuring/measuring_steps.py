"""Costs from real steps: the steps to run, and the costs that follow from their times.

There are several kinds of steps, all of one schedule. The first warm up and count memory, with
split and with full backwards in turn; then come steps with split backwards, and then steps with
full backwards. If recomputations are measured, a step that counts their memory and steps that time
them follow. After all steps, messages are timed.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from penstock.comm import AbstractComm
from penstock.costs import CostTable, StageCost
from penstock.costs.cost_table import HELD
from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Recompute,
    Schedule,
    StageId,
)
from penstock.ir.action import SingleCompute
from penstock.passes import add_recompute, split_backward
from penstock.runtime.measuring.action_times import Meter, Timing
from penstock.runtime.measuring.held_bytes import HeldBytes
from penstock.runtime.measuring.message_times import Edge, measure_edges
from penstock.runtime.measuring.observer import Observer
from penstock.runtime.messages.forms import Form


class _Purpose(Enum):
    """The purpose of a step."""

    WARM_UP = auto()
    SPLIT = auto()
    WHOLE = auto()
    DROPPING = auto()
    """To count the memory of recomputations."""
    AGAIN = auto()
    """To time them."""


class Measuring:
    """Steps that measure the stage costs of a schedule with full backwards.

    `schedule` is what the next step must run, watched by `make_observer()`; `take` takes that
    observer afterwards. With `recompute`, the costs of recomputations are measured too.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: torch.device,
        *,
        warm_up: int,
        repeats: int,
        recompute: bool = False,
    ) -> None:
        self._whole, self._split = schedule, split_backward(schedule)
        self._mixed = split_backward(schedule, only=lambda mb: mb % 2 == 0)
        self._device = device
        self._left = deque(
            [_Purpose.WARM_UP] * warm_up + [_Purpose.SPLIT] * repeats + [_Purpose.WHOLE] * repeats
        )
        self._again = schedule
        if recompute:
            self._again = add_recompute(self._mixed)
            self._left += [_Purpose.DROPPING] + [_Purpose.AGAIN] * repeats
        self._timings: defaultdict[tuple[type, StageId], list[Timing]] = defaultdict(list)
        self._held = self._held_again = HeldBytes(device)
        self.step_times_s: list[float] = []
        """The times of the steps with full backwards."""

    @property
    def is_done(self) -> bool:
        return not self._left

    @property
    def schedule(self) -> Schedule:
        kinds = {
            _Purpose.WARM_UP: self._mixed,
            _Purpose.SPLIT: self._split,
            _Purpose.DROPPING: self._again,
            _Purpose.AGAIN: self._again,
        }
        return kinds.get(self._left[0], self._whole) if self._left else self._whole

    def make_observer(self) -> Observer:
        if self._left[0] is _Purpose.WARM_UP:
            self._held = HeldBytes(self._device)
            return Observer(memory=self._held)
        if self._left[0] is _Purpose.DROPPING:
            self._held_again = HeldBytes(self._device)
            return Observer(memory=self._held_again)
        return Observer(Meter(self._device))

    def take(self, observer: Observer) -> None:
        """Take the observer of a step that has ended; then the next step may begin."""
        kind, meter = self._left.popleft(), observer.clock
        if kind in (_Purpose.WARM_UP, _Purpose.DROPPING):
            return
        assert isinstance(meter, Meter)
        if kind is _Purpose.WHOLE:
            self.step_times_s.append(meter.ended_s - meter.began_s)
        for action, timing in meter.timings.items():
            if kind is _Purpose.AGAIN and not isinstance(action, Recompute):
                continue  # Forwards that keep nothing are not like the others.
            self._timings[type(action), action.stage].append(timing)

    def share(self, comm: AbstractComm, forms: Mapping[Message, Form]) -> "Share":
        """Return this rank's part of the costs; all ranks must call it, as messages are timed."""
        placement = self._whole.placement
        edges = measure_edges(comm, self._device, placement, forms)
        stages = placement.stages_of(comm.rank)
        receipts_s = {edge: found.receipt_s for edge, found in edges.items()}
        costs = {stage: self._costs(stage, receipts_s) for stage in stages}
        return Share(costs, edges)

    def _costs(self, stage: StageId, receipts_s: Mapping[int, float]) -> StageCost:
        def median_s(kind: type[SingleCompute]) -> float:
            taking_s = receipt_s(kind(stage, 0), receipts_s)
            return statistics.median(
                timing.cost_s(taking_s) for timing in self._timings[kind, stage]
            )

        def during(kind: type[SingleCompute]) -> float:
            return max(_later(self._held.during[kind, stage]))

        after_forward = statistics.median(_later(self._held.after_forward[stage]))
        after_input = statistics.median(_later(self._held.after_input[stage]))
        if (Backward, stage) in self._held.during:
            during_backward = during(Backward)
        else:  # A single microbatch, whose backward was split: as much as its halves in a row.
            more = after_input - after_forward
            during_backward = max(0.0, during(BackwardInput), more + during(BackwardWeight))
        cost = StageCost(
            forward=median_s(Forward),
            backward_input=median_s(BackwardInput),
            backward_weight=median_s(BackwardWeight),
            backward=median_s(Backward),
            after_forward=after_forward,
            after_input=after_input,
            during_forward=during(Forward),
            during_input=during(BackwardInput),
            during_weight=during(BackwardWeight),
            during_backward=during_backward,
        )
        again = self._held_again
        if (Recompute, stage) not in again.during:
            return cost
        dropped = statistics.median(_later(again.after_dropping[stage]))
        return cost._replace(
            recompute=median_s(Recompute),
            after_dropping=min(after_forward, dropped),
            during_dropping=max(_later(again.during_dropping[stage])),
            during_recompute=max(_later(again.during[Recompute, stage])),
        )


def _later(counts: list[int]) -> list[int]:
    """Return the counts without the first, in which things are made that stay, if it can be."""
    return counts[1:] or counts


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a cost table."""

    stages: dict[StageId, StageCost]
    edges: dict[int, Edge]

    @property
    def receipts_s(self) -> dict[int, float]:
        return {edge: found.receipt_s for edge, found in self.edges.items()}


def receipt_s(action: SingleCompute, receipts_s: Mapping[int, float]) -> float:
    """Return the time in which an action takes a message that has already arrived."""
    edge = action.stage - 1 if isinstance(action, Forward) else action.stage
    return receipts_s.get(edge, 0.0)


def average(tables: Sequence[CostTable]) -> CostTable:
    """Return the costs that replicas plan with: mean times, and memory that is enough for all."""
    if len(tables) == 1:
        return tables[0]

    def each(name: str, combine: Callable[[tuple[float, ...]], float]) -> list[float]:
        return list(map(combine, zip(*(getattr(table, name) for table in tables), strict=True)))

    means = ("forward", "backward_input", "backward_weight", "backward", "recompute", "delay")
    largest = (*HELD, "message_bytes")
    return CostTable(
        **{name: each(name, statistics.fmean) for name in means},
        **{name: each(name, max) for name in largest},
        bandwidth=each("bandwidth", min),
        overlap_saving=tables[0].overlap_saving,
    )


def join(shares: Iterable[Share]) -> CostTable:
    """Return the cost table of all ranks."""
    stages: dict[StageId, StageCost] = {}
    edges: dict[int, Edge] = {}
    for share in shares:
        stages |= share.stages
        edges |= share.edges
    return CostTable.of(
        [stages[stage] for stage in sorted(stages)],
        [edges[edge].cost for edge in sorted(edges)],
    )

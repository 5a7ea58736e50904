"""A watch over a pipeline whose schedule is given: its first steps are the plan."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from penstock.comm import AbstractComm
from penstock.comm.decisions import decide
from penstock.costs import StageCost
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
from penstock.runtime.auto.seen_work import SeenWork
from penstock.runtime.auto.slow_watch import SlowWatch
from penstock.runtime.measuring.action_times import Meter
from penstock.runtime.measuring.measuring_steps import Share, join, receipt_s
from penstock.runtime.measuring.message_times import measure_edges
from penstock.runtime.measuring.observer import UNWATCHED, Observer
from penstock.runtime.measuring.slowness import Plan
from penstock.runtime.messages.forms import Form

# The steps before the first that is timed, and how many are timed to make the plan.
_WARM_UP = 2
_NUM_TIMED = 5


class GivenScheduleWatch:
    """Names the ranks and links that have become slower than in the first steps.

    `share` is how much slower: 0.5 for 50 %. All ranks must watch the same steps.
    """

    def __init__(self, share: float, device: torch.device) -> None:
        self._share = share
        self._device = device
        self._num_steps = 0
        self._meters: list[Meter] = []
        self._works: list[Sequence[float]] = []
        self.watch: SlowWatch | None = None
        """The watch over later steps, once the first have been timed."""

    def make_observer(self) -> Observer:
        """Return the observer of the next step."""
        watch = self.watch
        is_timed = self._num_steps >= _WARM_UP if watch is None else watch.is_looking
        return Observer(Meter(self._device)) if is_timed else UNWATCHED

    def end_step(
        self,
        observer: Observer,
        schedule: Schedule,
        comm: AbstractComm,
        forms: Mapping[Message, Form],
        work: Sequence[float],
    ) -> None:
        """End a step, perhaps with messages to other ranks."""
        meter = observer.clock
        if self.watch is not None:
            if isinstance(meter, Meter) and self.watch.is_looking:
                self.watch.take(meter, work, comm, self._device, forms)
            self.watch.num_steps += 1
            return
        self._num_steps += 1
        if isinstance(meter, Meter) and self._num_steps > _WARM_UP:
            self._meters.append(meter)
            self._works.append(work)
            if len(self._meters) == _NUM_TIMED:
                self.watch = self._begin(schedule, comm, forms)
                self._meters, self._works = [], []

    def _begin(
        self, schedule: Schedule, comm: AbstractComm, forms: Mapping[Message, Form]
    ) -> SlowWatch:
        """Make the plan of the steps that were timed."""
        edges = measure_edges(comm, self._device, schedule.placement, forms)
        receipts_s = {edge: found.receipt_s for edge, found in edges.items()}
        share = Share(_stage_costs(self._meters, receipts_s), edges)
        costs = decide(comm, self._device, share, join, "the times of the first steps")
        usual_s = statistics.median(meter.ended_s - meter.began_s for meter in self._meters)
        seen = SeenWork.of(self._works)
        return SlowWatch(Plan(schedule, costs, receipts_s), self._share, usual_s, seen)


def _stage_costs(
    meters: Sequence[Meter], receipts_s: Mapping[int, float]
) -> dict[StageId, StageCost]:
    """Return the median times of each stage; its memory is not known."""
    found: defaultdict[tuple[type[SingleCompute], StageId], list[float]] = defaultdict(list)
    for meter in meters:
        for action, timing in meter.timings.items():
            taking_s = receipt_s(action, receipts_s)
            found[type(action), action.stage].append(timing.cost_s(taking_s))

    def median_s(kind: type[SingleCompute], stage: StageId) -> float:
        return statistics.median(found.get((kind, stage), [0.0]))

    return {
        stage: StageCost(
            forward=median_s(Forward, stage),
            backward_input=median_s(BackwardInput, stage),
            backward_weight=median_s(BackwardWeight, stage),
            backward=median_s(Backward, stage),
            after_forward=0.0,
            after_input=0.0,
            recompute=median_s(Recompute, stage),
        )
        for stage in {stage for _, stage in found}
    }

"""A watch over the times of steps: every so often, some of them are compared with the plan.

    steps   1 … 15   16 17 18                19 … 31   32 33 34
            untimed  timed, then compared    untimed   timed, then compared

Medians over these steps count, so that a single slow one is no reason for suspicion. Messages are
timed only if steps take longer than before and no rank's own work explains it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.comm import AbstractComm
from penstock.comm.decisions import decide
from penstock.ir import Message, Rank, StageId
from penstock.runtime.auto.seen_work import UNKNOWN, SeenWork
from penstock.runtime.measuring.action_times import Meter
from penstock.runtime.measuring.message_times import Edge, measure_edges
from penstock.runtime.measuring.slowness import (
    LEAST_S,
    Plan,
    RankTimes,
    Slow,
    changed_costs,
    find_slow_links,
    find_slow_ranks,
)
from penstock.runtime.messages.forms import Form
from penstock.sim import simulate

LOGGER = logging.getLogger("penstock")
# The number of steps from one comparison to the next, and how many of them are timed for it.
LOOK_EVERY = 16
WINDOW = 3
DEFAULT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found by comparing steps with the plan; the same on all ranks."""

    drift: float
    """The largest share by which the time of a stage has changed."""
    slow: Mapping[Any, Slow]
    """The slow ranks and links."""
    asks_for_links: bool = False
    """True if steps take longer, and the ranks' own work does not explain it."""
    has_slow_link: bool = False


@dataclass(slots=True)
class SlowWatch:
    """Compares steps with a plan; all ranks' watches find the same, at the same steps.

    `share` is how much slower something must be to be named. `over` joins the verdicts of pipelines
    that decide together.
    """

    plan: Plan
    share: float
    usual_s: float
    """The time of a step of this rank when the plan was new."""
    seen: SeenWork = UNKNOWN
    every: int = LOOK_EVERY
    over: Callable[[Verdict], Verdict] = lambda verdict: verdict
    is_quiet: bool = False
    """True if nothing is to be logged."""
    num_steps: int = 0
    last: RankTimes | None = None
    """The times of this rank when it looked last."""
    _window: list[tuple[Meter, Any]] = field(default_factory=list)
    _named: dict[Any, Slow] = field(default_factory=dict)

    @property
    def is_looking(self) -> bool:
        """True if the next step is to be timed; the same on all ranks."""
        return bool(self._window) or (self.num_steps > 0 and self.num_steps % self.every == 0)

    def take(
        self,
        meter: Meter,
        work: Sequence[float],
        comm: AbstractComm,
        device: torch.device,
        forms: Mapping[Message, Form],
    ) -> Verdict | None:
        """Take a timed step; after the last of a window, compare, log, and return the verdict."""
        self._window.append((meter, self.seen.apply(self.plan.costs, work)))
        if len(self._window) < WINDOW:
            return None
        own = self.last = RankTimes.of(self._window, self.plan.receipts_s)
        self._window = []
        what = "how long steps take now"
        verdict: Verdict = decide(comm, device, (own, self.usual_s), self._compare, what)
        if verdict.asks_for_links:
            verdict = self._ask_links(verdict, own, comm, device, forms)
        if comm.rank == 0 and not self.is_quiet:
            self._log(verdict)
        return verdict

    def stage_times(self, rank: Rank) -> dict[StageId, float]:
        """Return the seconds that each stage of this rank takes in a step, as last measured."""
        if self.last is None:
            return self.plan.stage_times(rank)
        return self.last.stage_times

    def _compare(self, ranks: list[tuple[RankTimes, float]]) -> Verdict:
        """Compare the times of all ranks with the plan, on rank 0."""
        times = [time for time, _ in ranks]
        drift = max(time.drift for time in times)
        slow = find_slow_ranks(self.plan, times, self.share)
        lost_s = max(time.step_s - usual_s for time, usual_s in ranks)
        usual_s = max(usual_s for _, usual_s in ranks)
        asks = lost_s > self.share * usual_s and lost_s >= LEAST_S
        if asks:
            now_s = simulate(self.plan.schedule, changed_costs(self.plan.costs, times)).makespan
            explained_s = max(0.0, now_s - self.plan.step_s)
            asks = lost_s - explained_s > self.share * usual_s
        return self.over(Verdict(drift, slow, asks))

    def _ask_links(
        self,
        verdict: Verdict,
        own: RankTimes,
        comm: AbstractComm,
        device: torch.device,
        forms: Mapping[Message, Form],
    ) -> Verdict:
        """Time the messages between ranks, and add the links that are slow."""
        edges = measure_edges(comm, device, self.plan.schedule.placement, forms)

        def find(ranks: list[tuple[str, dict[int, Edge]]]) -> Verdict:
            hosts = [host for host, _ in ranks]
            joined = {number: edge for _, found in ranks for number, edge in found.items()}
            links = find_slow_links(self.plan, hosts, joined, self.share)
            slow = {**verdict.slow, **links}
            return self.over(replace(verdict, slow=slow, has_slow_link=bool(links)))

        return decide(comm, device, (own.host, edges), find, "the times of messages now")

    def _log(self, verdict: Verdict) -> None:
        """Log what has become slow since the last look, and what is as planned again."""
        for key, slow in verdict.slow.items():
            if key not in self._named:
                LOGGER.warning("%s", slow)
        for key in self._named.keys() - verdict.slow.keys():
            LOGGER.info("%s is as fast as planned again", self._named[key].who)
        self._named = dict(verdict.slow)

"""What limits the time of a step, and what would shorten it.

Each answer is found by asking again: a brief search for the same work with one thing changed, such
as messages that take no time. The change that would save most is what limits the step.
"""

from dataclasses import dataclass, replace
from math import fsum, inf
from operator import mul
from statistics import fmean
from typing import Any

from penstock.costs import CostTable
from penstock.errors import CostError, ScheduleError
from penstock.ir import Placement
from penstock.sim import simulate
from penstock.solver.gathered_search import GatherChoice
from penstock.solver.problem_checks import check_positive, check_recompute
from penstock.solver.search_result import SearchResult
from penstock.solver.searching import search

_LEAST_GAIN = 0.005  # A smaller share of the time is not worth a word.
_LEAST_LIMIT = 0.02  # And a change that would save less does not limit anything.
_EFFORT = 0.1  # Of each brief search, for an effort up to 1; less would miss most gains.
_LEAST_S = 0.2  # The time that any of them may take.
_MOST_SEARCHES = 9
_SMALL_BUBBLE = 0.05
_TIMES = ("forward", "backward_input", "backward_weight", "backward", "recompute")


@dataclass(frozen=True, slots=True)
class Help:
    """A change that would shorten a step."""

    what: str
    gain: float
    """The share of the time that it would save, for the same number of samples."""

    def __str__(self) -> str:
        return f"{self.what}: {self.gain:.1%} less time"


@dataclass(frozen=True, slots=True)
class Advice:
    """What limits a step, in a sentence, and what would shorten it, the best first."""

    limit: str
    helps: tuple[Help, ...]

    @property
    def lines(self) -> list[str]:
        """A sentence for the limit, and one for each help."""
        return [self.limit, *(f"What would help: {help}." for help in self.helps)]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def advise(
    found: SearchResult,
    *,
    costs_in_v: CostTable | None,
    seconds: float,
    effort: float,
    is_balanced: bool = False,
) -> Advice:
    """Return the advice on what a search has found; see `SearchResult.advise`.

    If the cut is balanced already, moving whole layers would not make stages more equal.

    >>> costs = CostTable(
    ...     forward=[1, 1, 1, 3], backward_input=[1, 1, 1, 3], backward_weight=[1, 1, 1, 3]
    ... )
    >>> print(search(costs, 4, 16).advise())
    Rank 3 limits the step: its work takes 2 times the mean.
    What would help: layers moved away from rank 3, for equal stages: 48.0% less time.
    What would help: twice as many microbatches of the same size: 1.0% less time.
    """
    check_positive("seconds", seconds)
    check_positive("effort", effort)
    own = found.report.costs
    if costs_in_v is not None and (
        (costs_in_v.num_microbatches, costs_in_v.memory_scale)
        != (own.num_microbatches, own.memory_scale)
    ):
        raise CostError(
            f"costs_in_v has scales for {costs_in_v.num_microbatches} microbatches, which are not "
            f"those of the {own.num_microbatches} in the costs of the schedule. Expected the same "
            "microbatches: use for_lengths() with the same lengths."
        )
    asked = _Asked(
        costs=own,
        placement=found.schedule.placement,
        num_microbatches=found.schedule.num_microbatches,
        memory=found.memory,
        gathers=found.gathers,
        recompute=found.recompute,
    )
    brief = _Brief(found, asked, seconds / _MOST_SEARCHES, max(effort, 1.0) * _EFFORT)
    rank, share = _busiest(asked)
    moved = brief.gain(asked.with_equal_stages()) if share > 1 + _LEAST_GAIN else 0.0
    filling = brief.gain(asked.with_twice_the_microbatches())
    uncapped = brief.gain(replace(asked, memory=None)) if asked.memory is not None else 0.0
    limits = {
        f"Rank {rank} limits the step: its work takes {share:.2g} times the mean.": moved,
        "Messages limit the step: ranks wait for them.": brief.gain(asked.with_speed(inf)),
        "Memory limits the step: with more of it, ranks could work further ahead.": uncapped,
        # Twice as many microbatches save half of what it costs to fill and drain the pipe.
        "Filling and draining the pipe limits the step: microbatches are few.": 2 * filling,
    }
    limit = max(limits, key=limits.__getitem__)
    if limits[limit] < _LEAST_LIMIT:
        idle = 1 - fmean(rank.busy for rank in found.report.ranks) / found.time
        what = "The work itself limits" if idle < _SMALL_BUBBLE else "No one thing limits"
        limit = f"{what} the step: ranks are idle for {idle:.1%} of the time."
    helps = [
        Help(
            f"layers of rank {rank} that are split or cheaper, for equal stages"
            if is_balanced
            else f"layers moved away from rank {rank}, for equal stages",
            moved,
        ),
        Help("twice as many microbatches of the same size", filling),
        Help("messages twice as fast", brief.gain(asked.with_speed(2.0))),
        Help("a search with more effort", brief.gain_of_searching),
    ]
    if asked.memory is not None and uncapped >= _LEAST_GAIN:
        doubled = tuple(2 * cap for cap in asked.memory)
        helps.append(Help("twice the memory", brief.gain(replace(asked, memory=doubled))))
        if not asked.recompute and check_recompute("auto", asked.costs):
            again = brief.gain(replace(asked, recompute=True))
            helps.append(Help("forwards that are recomputed", again))
    if costs_in_v is not None and asked.costs.num_stages == asked.placement.num_ranks:
        in_v = replace(asked, costs=costs_in_v, placement=Placement.v(asked.placement.num_ranks))
        helps.append(Help("two stages per rank, in a V", brief.gain(in_v)))
    worth = [help for help in helps if help.gain >= _LEAST_GAIN]
    return Advice(limit, tuple(sorted(worth, key=lambda help: -help.gain)))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The question that a schedule answers, and others like it."""

    costs: CostTable
    placement: Placement
    num_microbatches: int
    memory: tuple[float, ...] | None
    gathers: GatherChoice | None
    recompute: bool

    def with_equal_stages(self) -> "_Asked":
        """Ask for stages that take the mean time of all."""
        costs, num_stages = self.costs, self.costs.num_stages
        even: Any = {
            name: (fmean(map(mul, getattr(costs, name), _paces(costs))),) * num_stages
            for name in _TIMES
        }
        if costs.time_scale:
            mean = [fmean(row) for row in zip(*_evened(costs), strict=True)]
            even["time_scale"] = (tuple(mean),) * num_stages
        return replace(self, costs=replace(costs, **even))

    def with_speed(self, factor: float) -> "_Asked":
        """Ask for messages that are this many times as fast."""
        costs = self.costs
        faster = replace(
            costs,
            delay=tuple(delay / factor for delay in costs.delay),
            message_bytes=tuple(size / factor for size in costs.message_bytes),
        )
        return replace(self, costs=faster)

    def with_twice_the_microbatches(self) -> "_Asked":
        """Ask for two batches in one step."""
        costs = replace(
            self.costs,
            time_scale=tuple(row * 2 for row in self.costs.time_scale),
            memory_scale=self.costs.memory_scale * 2,
        )
        return replace(self, costs=costs, num_microbatches=2 * self.num_microbatches)


class _Brief:
    """Brief searches that are compared with what was found."""

    def __init__(self, found: SearchResult, own: _Asked, seconds: float, effort: float) -> None:
        self._found, self._own = found, own
        self._seconds = max(seconds, _LEAST_S)
        self._effort = effort
        # What a brief search saves with nothing changed is not due to any change.
        self._time = found.time if found.gap < _LEAST_GAIN else min(found.time, self._search(own))

    @property
    def gain_of_searching(self) -> float:
        """The share of the time that a brief search saves with nothing changed."""
        return 1 - self._time / self._found.time if self._found.time else 0.0

    def gain(self, asked: _Asked) -> float:
        """Return the share of the time that would be saved, for the same number of microbatches."""
        if asked == self._own:
            return 0.0
        schedule = self._found.schedule
        batches = asked.num_microbatches / schedule.num_microbatches
        times = [self._search(asked)]
        if batches == 1 and asked.placement == schedule.placement:
            report = simulate(schedule, asked.costs)
            times.append(report.makespan if self._found.clock == "makespan" else report.span)
        return max(0.0, 1 - min(times) / batches / self._time) if self._time else 0.0

    def _search(self, asked: _Asked) -> float:
        try:
            return search(
                asked.costs,
                asked.placement.num_ranks,
                asked.num_microbatches,
                memory=asked.memory,
                placements=[asked.placement],
                clock=self._found.clock,
                seconds=self._seconds,
                effort=self._effort,
                gathers=asked.gathers,
                recompute=asked.recompute,
            ).time
        except ScheduleError:  # Nothing fits, so nothing is gained.
            return inf


def _busiest(asked: _Asked) -> tuple[int, float]:
    """Return the rank with the most work, and how many times the mean of all ranks that is."""
    costs, placement = asked.costs, asked.placement
    paces = _paces(costs)
    work = [
        fsum(paces[s] * (costs.forward[s] + costs.backward[s]) for s in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    ]
    most = max(work)
    return work.index(most), (most / fmean(work) if most > 0 else 1.0)


def _paces(costs: CostTable) -> list[float]:
    """Return the mean factor of the times of each stage."""
    return [fmean(row) for row in costs.time_scale] or [1.0] * costs.num_stages


def _evened(costs: CostTable) -> list[list[float]]:
    """Return the factors of each stage by microbatch, with a mean of 1."""
    return [[value / fmean(row) for value in row] for row in costs.time_scale]

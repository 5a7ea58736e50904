"""Search briefly for schedules of all choices, and thoroughly for the best ones."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.ir import Placement
from penstock.planning.stage_sources import Choice
from penstock.solver import Problem, SearchResult, lower_bound, search
from penstock.solver.placement_choices import describe

LOGGER = logging.getLogger("penstock")
_QUICK_EFFORT = 0.02
_QUICK_SHARE = 0.5  # The share of the time for the brief searches.
_LEAST_S = 1.0  # The time that any search may take.


@dataclass(frozen=True, slots=True)
class Limits:
    """The time and effort of the searches, and the number of rows to keep."""

    seconds: float
    effort: float
    keep: int


@dataclass(frozen=True, slots=True)
class Found:
    """A choice and the best schedule that was found for it."""

    choice: Choice
    result: SearchResult

    @property
    def shape(self) -> tuple[int, Placement]:
        return self.choice.num_microbatches, self.choice.placement


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best of each shape, and a bound for all choices."""

    found: list[Found]
    lower_bound: float
    is_complete: bool


def choose(choices: Sequence[Choice], limits: Limits) -> Outcome:
    """Return the best shapes; here a shape is a number of microbatches and a placement."""
    planning = _Planning(limits)
    bounds = [lower_bound(_problem(choice)) for choice in choices]
    found = planning.search_best(planning.search_all(choices, bounds))
    return Outcome(found, min(bounds), planning.is_complete)


class _Planning:
    """The searches for one plan; `is_complete` is False if time ran out."""

    def __init__(self, limits: Limits) -> None:
        self.is_complete = True
        self._limits = limits
        self._start = time.monotonic()

    def search_all(self, choices: Sequence[Choice], bounds: Sequence[float]) -> list[Found]:
        """Return the best shapes after a brief search for each choice, the lowest bound first.

        It ends when the bounds of the other choices prove that none is among the best.
        """
        order = sorted(range(len(choices)), key=lambda index: bounds[index])
        best: dict[tuple[int, Placement], Found] = {}
        keep = self._limits.keep
        for place, index in enumerate(order):
            times = sorted(found.result.time for found in best.values())
            if len(times) >= keep and bounds[index] > times[keep - 1]:
                break
            left_s = self._left_s(_QUICK_SHARE)
            if best and left_s <= 0:
                self.is_complete = False
                break
            found = self._search(choices[index], left_s / (len(order) - place), _QUICK_EFFORT)
            LOGGER.info("planning, %d of %d: %s", place + 1, len(order), _describe(found))
            before = best.setdefault(found.shape, found)
            if found.result.time < before.result.time:
                best[found.shape] = found
        return sorted(best.values(), key=_rate)[:keep]

    def search_best(self, quick: Sequence[Found]) -> list[Found]:
        """Search thoroughly where a better schedule may exist, and return the shapes by time."""
        found = []
        for place, one in enumerate(quick):
            best, left_s = one, self._left_s(1.0)
            if one.result.gap > 0 and left_s <= 0:
                self.is_complete = False
            elif one.result.gap > 0:
                full = self._search(one.choice, left_s / (len(quick) - place), 1.0)
                LOGGER.info("planning, best %d of %d: %s", place + 1, len(quick), _describe(full))
                best = min(one, full, key=_rate)
            found.append(best)
        return sorted(found, key=_rate)

    def _left_s(self, share: float) -> float:
        """Return how much is left of this share of the time."""
        return self._start + self._limits.seconds * share - time.monotonic()

    def _search(self, choice: Choice, seconds: float, effort: float) -> Found:
        result = search(
            choice.costs,
            choice.placement.num_ranks,
            choice.num_microbatches,
            memory=choice.caps,
            placements=[choice.placement],
            seconds=max(seconds, _LEAST_S),
            effort=effort * self._limits.effort,
        )
        self.is_complete &= result.is_complete
        return Found(choice, result)


def _problem(choice: Choice) -> Problem:
    return Problem.of(choice.costs, choice.placement, choice.num_microbatches, memory=choice.caps)


def _rate(found: Found) -> tuple[float, float, int]:
    """Return a sort key: time, then peak memory, then the number of microbatches."""
    result = found.result
    return result.time, result.report.peak_memory, found.choice.num_microbatches


def _describe(found: Found) -> str:
    choice, result = found.choice, found.result
    return (
        f"{choice.num_microbatches} microbatches, {describe(choice.placement)}: time "
        f"{result.time:.5g}, gap {result.gap:.2%}"
    )

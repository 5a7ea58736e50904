"""Search briefly for schedules of all choices, and thoroughly for the best ones."""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from penstock.costs.memory_levels import describe_levels
from penstock.ir import Placement
from penstock.planning.stage_sources import Choice
from penstock.solver import Problem, SearchResult, lower_bound, search
from penstock.solver.placement_choices import describe
from penstock.solver.problem_checks import check_recompute

LOGGER = logging.getLogger("penstock")
_QUICK_EFFORT = 0.02
_QUICK_SHARE = 0.5  # The share of the time for the brief searches.
_NUM_FINALISTS = 3  # The number of choices of each shape that are searched thoroughly.
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

    def search_all(self, choices: Sequence[Choice], bounds: Sequence[float]) -> list[list[Found]]:
        """Return the best shapes after a brief search for each choice, the lowest bound first.

        Each shape comes with what was found for it, the best first. Uniform levels are searched
        before mixes of levels. Choices whose bounds prove that they are not the best of their
        shape, or not of the best shapes, are left out.
        """
        left = sorted(
            range(len(choices)), key=lambda index: (not choices[index].is_uniform, bounds[index])
        )
        shapes: defaultdict[tuple[int, Placement], list[Found]] = defaultdict(list)
        while left := self._promising(left, choices, bounds, shapes):
            left_s = self._left_s(_QUICK_SHARE)
            if shapes and left_s <= 0:
                self.is_complete = False
                break
            found = self._search(choices[left[0]], left_s / len(left), _QUICK_EFFORT)
            left = left[1:]
            shapes[found.choice.shape].append(found)
            shapes[found.choice.shape].sort(key=_rate)
            place = sum(map(len, shapes.values()))
            LOGGER.info(
                "planning, %d of at most %d: %s", place, place + len(left), _describe(found)
            )
        return sorted(shapes.values(), key=lambda found: _rate(found[0]))[: self._limits.keep]

    def _promising(
        self,
        left: Sequence[int],
        choices: Sequence[Choice],
        bounds: Sequence[float],
        shapes: Mapping[tuple[int, Placement], Sequence[Found]],
    ) -> list[int]:
        """Return those of `left` that may be the best of their shape, and of the shapes to keep."""
        times = {shape: found[0].result.time for shape, found in shapes.items()}
        worst = next(islice(sorted(times.values()), self._limits.keep - 1, None), inf)
        return [
            index
            for index in left
            if bounds[index] <= worst and bounds[index] < times.get(choices[index].shape, inf)
        ]

    def search_best(self, shapes: Sequence[list[Found]]) -> list[Found]:
        """Search thoroughly where a better schedule may exist, and return the shapes by time.

        In each shape these are the best few choices, and all uniform levels: a mix of levels is
        never slower than one of them.
        """
        return sorted(
            (self._best_of(found, len(shapes) - n) for n, found in enumerate(shapes)), key=_rate
        )

    def _best_of(self, quick: Sequence[Found], num_left: int) -> Found:
        """Return the best of one shape; `num_left` shapes share the time that is left."""
        best = quick[0]
        finalists = [*quick[:_NUM_FINALISTS], *filter(_has_one_level, quick[_NUM_FINALISTS:])]
        for place, one in enumerate(finalists):
            left_s = self._left_s(1.0)
            if one.result.gap == 0 or one.result.lower_bound >= best.result.time:
                continue
            if left_s <= 0:
                self.is_complete = False
                break
            full = self._search(one.choice, left_s / num_left / (len(finalists) - place), 1.0)
            LOGGER.info("planning, %d shapes left: %s", num_left, _describe(full))
            best = min(best, full, key=_rate)
        return best

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
            recompute="auto",
        )
        self.is_complete &= result.is_complete
        return Found(choice, result)


def _problem(choice: Choice) -> Problem:
    return Problem.of(
        choice.costs,
        choice.placement,
        choice.num_microbatches,
        memory=choice.caps,
        recompute=check_recompute("auto", choice.costs),
    )


def _has_one_level(found: Found) -> bool:
    return bool(found.choice.levels) and found.choice.is_uniform


def _rate(found: Found) -> tuple[float, float, int]:
    """Return a sort key: time, then peak memory, then the number of microbatches."""
    result = found.result
    return result.time, result.report.peak_memory, found.choice.num_microbatches


def _describe(found: Found) -> str:
    choice, result = found.choice, found.result
    levels = f", levels {describe_levels(choice.levels)}" if choice.levels else ""
    return (
        f"{choice.num_microbatches} microbatches, {describe(choice.placement)}{levels}: time "
        f"{result.time:.5g}, gap {result.gap:.2%}"
    )

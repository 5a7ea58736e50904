"""Stages for microbatches of different sizes."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import fmean

from penstock.costs import Work
from penstock.costs.lengths import Lengths, read_lengths
from penstock.ir import Placement
from penstock.passes.held_memory import ROUNDING
from penstock.planning.stage_sources import AbstractSource, Choice, Refusal
from penstock.solver import Problem
from penstock.solver.problem_checks import check_recompute


class SizedSource(AbstractSource):
    """The stages of another source, whose costs are those of a microbatch of mean length."""

    def __init__(self, source: AbstractSource, lengths: Lengths, work: Work, memory: float) -> None:
        self._source, self._work, self._memory = source, work, memory
        self._lengths = read_lengths("lengths", lengths)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches that have a length."""
        return len(self._lengths)

    @property
    def batch_size(self) -> int:
        return self._source.batch_size

    @property
    def placements(self) -> list[Placement]:
        return self._source.placements

    def choices(self, num_microbatches: int, placement: Placement) -> list[Choice] | Refusal:
        found = self._source.choices(num_microbatches, placement)
        if isinstance(found, Refusal):
            if found.least_memory == inf:
                return found
            # That is what a microbatch of mean length needs. Parameters are not scaled, so a
            # little less may do.
            tokens = [sum(documents) for documents in self._lengths]
            return Refusal.for_memory(
                found.least_memory * max(tokens) / fmean(tokens), found.cut_points
            )
        sized = [self._with_lengths(choice) for choice in found]
        needed = [_needed(choice) for choice in sized]
        if min(map(max, needed)) > self._memory * ROUNDING:
            least, choice = min(zip(map(max, needed), sized, strict=True), key=lambda one: one[0])
            return Refusal.for_memory(least, choice.cut_points)
        return [
            _with_room(choice, by_rank)
            for choice, by_rank in zip(sized, needed, strict=True)
            if max(by_rank) <= self._memory * ROUNDING
        ]

    def _with_lengths(self, choice: Choice) -> Choice:
        return replace(choice, costs=choice.costs.for_lengths(self._lengths, work=self._work))


def _needed(choice: Choice) -> list[float]:
    """Return the memory of each rank with which its largest microbatch fits."""
    problem = Problem.of(
        choice.costs,
        choice.placement,
        choice.num_microbatches,
        recompute=check_recompute("auto", choice.costs),
    )
    pairs = zip(choice.parameter_memory, problem.smallest_caps, strict=True)
    return [fixed + one for fixed, one in pairs]


def _with_room(choice: Choice, needed: Sequence[float]) -> Choice:
    """Return the choice with caps in which the largest microbatch fits, in spite of rounding."""
    fits = (need - own for need, own in zip(needed, choice.parameter_memory, strict=True))
    return replace(choice, caps=tuple(map(max, choice.caps, fits)))

"""The work of the microbatches in measured steps, if they differ.

Microbatches run in the order of the rule in `microbatch_order`. So the shortest of each step have
the same place in the schedule, and the longest too: what is searched for is the mean step.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.costs import CostTable

_LEAST = 1e-3  # The least share of the usual work: a microbatch without any takes some time too.


@dataclass(frozen=True, slots=True)
class SeenWork:
    """The work of each microbatch as they ran, step by step; none if it is not known."""

    steps: tuple[tuple[float, ...], ...]
    usual: float
    """The work that the measured costs are for: the median, as they are medians."""

    @classmethod
    def of(cls, steps: Sequence[Sequence[float]]) -> "SeenWork":
        values = [work for step in steps for work in step]
        usual = statistics.median(values) if values else 0.0
        return cls(tuple(map(tuple, steps)), usual) if usual > 0 else UNKNOWN

    @property
    def differing(self) -> tuple[tuple[float, ...], ...]:
        """The steps, if their microbatches differ; none if all are alike."""
        return self.steps if len({work for step in self.steps for work in step}) > 1 else ()

    @property
    def mean(self) -> tuple[float, ...]:
        """The mean work at each place; empty if microbatches are alike."""
        return tuple(map(statistics.fmean, zip(*self.differing, strict=True)))

    def apply(self, costs: CostTable, work: Sequence[float]) -> CostTable:
        """Return measured costs for microbatches of this work; the same if it is not known.

        >>> seen = SeenWork.of([[1, 2, 4]])
        >>> seen.apply(CostTable.uniform(1), seen.mean).time_scale
        ((0.5, 1.0, 2.0),)
        """
        if not self.steps or not work:
            return costs
        scales = tuple(max(one / self.usual, _LEAST) for one in work)
        return replace(costs, time_scale=(scales,) * costs.num_stages)


UNKNOWN = SeenWork((), 1.0)
"""Microbatches whose work is not known, which are taken to be alike."""

"""The result of a search, and the schedules it tried."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from penstock.costs import CostTable
from penstock.ir import MicrobatchId, Schedule
from penstock.schedules.generator import Clock
from penstock.solver.chosen_orders import backward_order, count_recomputed, forward_order
from penstock.timeline import Report

if TYPE_CHECKING:
    from penstock.solver.advice import Advice
    from penstock.solver.gathered_search import GatherChoice


@dataclass(frozen=True, slots=True)
class Tried:
    """A schedule that was tried, or the best of many that were made in one way."""

    name: str
    placement: str
    time: float
    peak_memory: float
    fits: bool
    count: int
    """The number of schedules that this is the best of."""


def best_of_each(tried: Iterable[Tried]) -> tuple[Tried, ...]:
    """Return the best for each name and placement, over all orders of microbatches that differ."""
    best: dict[tuple[str, str], Tried] = {}
    for one in tried:
        known = best.setdefault((one.name, one.placement), one)
        if known is one:
            continue
        better = min(known, one, key=lambda either: (not either.fits, either.time))
        best[one.name, one.placement] = replace(better, count=known.count + one.count)
    return tuple(best.values())


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult:
    """The best schedule that was found, and its distance from a proven bound.

    `str()` returns a table of the schedules that were tried.
    """

    schedule: Schedule
    report: Report
    """The simulated report of the schedule."""
    clock: Clock
    lower_bound: float
    """No schedule for these costs, ranks, microbatches and memory is faster, by the clock."""
    tried: tuple[Tried, ...]
    seconds: float
    """The time that the search took."""
    is_complete: bool
    """True if the search ended by itself, False if its time budget stopped it."""
    memory: tuple[float, ...] | None = None
    """The most that each rank may hold; None if that is not limited."""
    gathers: "GatherChoice | None" = None
    """The policy of gathers that was asked for, if stages are sharded."""
    recompute: bool = False
    """True if forwards were allowed to be recomputed."""

    @property
    def time(self) -> float:
        """The time of the schedule, by the clock."""
        return self.report.makespan if self.clock == "makespan" else self.report.span

    @property
    def gap(self) -> float:
        """The share by which the schedule is slower than the bound: 0 is proven to be the best."""
        if self.lower_bound <= 0:
            return inf if self.time > 0 else 0.0
        gap = self.time / self.lower_bound - 1
        return gap if gap > 1e-9 else 0.0

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The number of microbatches whose forwards are recomputed, for each stage."""
        return count_recomputed(self.schedule)

    @property
    def forward_order(self) -> tuple[MicrobatchId, ...]:
        """The microbatches in the order of their forwards on the first stage."""
        return forward_order(self.schedule)

    @property
    def backward_order(self) -> tuple[MicrobatchId, ...]:
        """The microbatches in the order of their backwards on the first stage."""
        return backward_order(self.schedule)

    def advise(
        self, *, costs_in_v: CostTable | None = None, seconds: float = 10.0, effort: float = 1.0
    ) -> "Advice":
        """Say what limits the step, and what would shorten it by how much.

        If `costs_in_v` has the costs of the same model as two stages per rank, a V is tried. Brief
        searches take at most about `seconds` together, and try more with an `effort` above 1.
        """
        from penstock.solver.advice import advise  # It searches, and so needs this module.

        return advise(self, costs_in_v=costs_in_v, seconds=seconds, effort=effort)

    def __repr__(self) -> str:
        return (
            f"SearchResult({self.clock}={self.time:g}, lower_bound={self.lower_bound:g}, "
            f"gap={self.gap:.2%}, peak_memory={self.report.peak_memory:g})"
        )

    def __str__(self) -> str:
        best = f"{self.clock} {self.time:.5g}, bound {self.lower_bound:.5g}, gap {self.gap:.2%}"
        if not self.is_complete:
            best += f" (stopped after {self.seconds:.1f} s)"
        header = (self.clock, "memory", "fits", "of", "placement", "tried")
        rows = [
            (
                f"{tried.time:.5g}",
                f"{tried.peak_memory:.5g}",
                "yes" if tried.fits else "no",
                str(tried.count),
                tried.placement,
                tried.name,
            )
            for tried in sorted(self.tried, key=lambda tried: (not tried.fits, tried.time))
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if index < 4 else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (header, *rows)
        ]
        return "\n".join([best, *lines])

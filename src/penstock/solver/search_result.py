"""What a search found, and what it tried."""

from dataclasses import dataclass
from math import inf

from penstock.ir import Schedule
from penstock.schedules.generator import Clock
from penstock.timeline import Report


@dataclass(frozen=True, slots=True)
class Tried:
    """A schedule that was tried, or the best of many that were made in one way."""

    name: str
    placement: str
    time: float
    peak_memory: float
    fits: bool
    count: int
    """How many schedules this is the best of."""


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult:
    """The best schedule that was found, and how far it is from the best there could be.

    `str()` is a table of what was tried.
    """

    schedule: Schedule
    report: Report
    """The schedule in the simulator."""
    clock: Clock
    lower_bound: float
    """No schedule for these costs, ranks, microbatches and memory is faster, by the clock."""
    tried: tuple[Tried, ...]
    seconds: float
    """How long the search took."""
    is_complete: bool
    """Whether it came to its end, or was stopped by its time budget."""

    @property
    def time(self) -> float:
        """What the schedule takes, by the clock."""
        return self.report.makespan if self.clock == "makespan" else self.report.span

    @property
    def gap(self) -> float:
        """By which share the schedule is slower than the bound: 0 is proven to be the best."""
        if self.lower_bound <= 0:
            return inf if self.time > 0 else 0.0
        gap = self.time / self.lower_bound - 1
        return gap if gap > 1e-9 else 0.0

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

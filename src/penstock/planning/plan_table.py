"""The contents of a plan: the best choices, and those that were left out."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.costs import CostTable, Level
from penstock.costs.memory_levels import describe_levels
from penstock.cutting import SplitPoint
from penstock.ir import MicrobatchId, Placement, Schedule
from penstock.partition import Partition
from penstock.solver import SearchResult
from penstock.solver.advice import Advice
from penstock.solver.chosen_orders import describe_order, describe_recomputed
from penstock.solver.placement_choices import describe
from penstock.solver.registered_schedules import registered


@dataclass(frozen=True, slots=True, repr=False)
class PlanRow:
    """A cut, a number of microbatches and a schedule, with all that is needed to run them.

    Times are for one batch and memory is for each rank, in the units of the costs.
    """

    num_microbatches: int
    mb_size: int
    """The number of samples in a microbatch."""
    placement: Placement
    partition: Partition | None
    """The layers of each stage; None if the stages were given."""
    cut_points: tuple[str, ...]
    """The first layer of each later stage, for `cut_between_modules`; none if stages were given."""
    costs: CostTable
    """The costs of the stages for one microbatch."""
    parameter_memory: tuple[float, ...]
    """The memory of each rank for parameters, their gradients and the optimizer's state.

    On the rank of the last stage, with what the backward of a counted loss needs.
    """
    result: SearchResult
    levels: tuple[Level, ...] = ()
    """The memory level of each stage; none if no levels were given."""

    @property
    def schedule(self) -> Schedule:
        return self.result.schedule

    @property
    def schedule_name(self) -> str:
        """The name of the algorithm, or "searched" if the schedule is not a registered one."""
        made = registered(self.placement, self.num_microbatches)
        return next((name for name, schedule in made if schedule == self.schedule), "searched")

    @property
    def split_spec(self) -> dict[str, SplitPoint]:
        """The cut in the form that `penstock.cut` takes."""
        return dict.fromkeys(self.cut_points, SplitPoint.BEGINNING)

    @property
    def time(self) -> float:
        """The time of a step, from the first start to the last end."""
        return self.result.time

    @property
    def bubble(self) -> float:
        """The share of that time in which the ranks do not compute."""
        return self.result.report.bubble_by_makespan

    @property
    def gap(self) -> float:
        """The gap of the schedule to the bound: see `SearchResult`."""
        return self.result.gap

    @property
    def lower_bound(self) -> float:
        """A time that no schedule for this cut and number of microbatches can beat."""
        return self.result.lower_bound

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The number of microbatches whose forwards are recomputed, for each stage."""
        return self.result.recomputed

    @property
    def forward_order(self) -> tuple[MicrobatchId, ...]:
        """The microbatches in the order of their forwards on the first stage."""
        return self.result.forward_order

    @property
    def backward_order(self) -> tuple[MicrobatchId, ...]:
        """The microbatches in the order of their backwards on the first stage."""
        return self.result.backward_order

    @property
    def sentences(self) -> list[str]:
        """The cut, what is recomputed, and the order of microbatches that differ, in words."""
        found = [describe_recomputed(self.schedule)]
        if self.costs.num_microbatches is not None:
            found.append(describe_order(self.schedule))
        if self.partition is None:  # The stages were given.
            return found
        cut = f"cut before {', '.join(self.cut_points)}" if self.cut_points else "not cut"
        return [f"The model is {cut}.", *found]

    @property
    def memory(self) -> tuple[float, ...]:
        """The most that each rank holds, with parameters and activations."""
        ranks = zip(self.parameter_memory, self.result.report.ranks, strict=True)
        return tuple(fixed + rank.peak_memory for fixed, rank in ranks)

    def advise(self, *, seconds: float = 10.0, effort: float = 1.0) -> Advice:
        """Say what limits the step, and what would help; brief searches find out."""
        from penstock.solver.advice import advise  # It takes a while to load.

        is_balanced = self.partition is not None
        return advise(
            self.result, costs_in_v=None, seconds=seconds, effort=effort, is_balanced=is_balanced
        )

    def __repr__(self) -> str:
        levels = f", levels=({describe_levels(self.levels)})" if self.levels else ""
        return (
            f"PlanRow({self.num_microbatches} microbatches of {self.mb_size}, "
            f"{describe(self.placement)}, time={self.time:g}, bubble={self.bubble:.2%}, "
            f"memory={max(self.memory):g}, gap={self.gap:.2%}{levels})"
        )


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A choice that cannot be run, with the reason."""

    num_microbatches: int
    placement: Placement
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The rows of a plan, the best first; `str()` returns a table."""

    rows: tuple[PlanRow, ...]
    left_out: tuple[LeftOut, ...]
    num_considered: int
    """The number of choices of a cut and a number of microbatches that were compared."""
    lower_bound: float
    """The bound for all choices: no schedule for any of them is faster."""
    is_complete: bool
    """True if every search ended by itself, False if the time budget stopped one."""

    @property
    def best(self) -> PlanRow:
        return self.rows[0]

    @property
    def gap(self) -> float:
        """The share by which the best row is slower than the lower bound."""
        gap = self.best.time / self.lower_bound - 1 if self.lower_bound > 0 else 0.0
        return gap if gap > 1e-9 else 0.0

    def __repr__(self) -> str:
        return f"Plan(best={self.best!r}, rows={len(self.rows)}, left_out={len(self.left_out)})"

    def __str__(self) -> str:
        numbers = ("microbatches", "size", "time", "bubble", "memory", "gap")
        words = ("placement", "schedule", *(["levels"] if self.best.levels else []))
        rows = [
            (
                str(row.num_microbatches),
                str(row.mb_size),
                f"{row.time:.5g}",
                f"{row.bubble:.2%}",
                f"{max(row.memory):.5g}",
                f"{row.gap:.2%}",
                describe(row.placement),
                row.schedule_name,
                *([describe_levels(row.levels)] if row.levels else []),
            )
            for row in self.rows
        ]
        stopped = "" if self.is_complete else " (stopped by its time budget)"
        return "\n".join(
            [
                f"time {self.best.time:.5g}, bound {self.lower_bound:.5g} over "
                f"{self.num_considered} choices, gap {self.gap:.2%}{stopped}",
                *_align([(*numbers, *words), *rows], num_numbers=len(numbers)),
                *self.best.sentences,
                *_reasons(self.left_out),
            ]
        )


def _align(rows: Sequence[Sequence[str]], *, num_numbers: int) -> list[str]:
    """Return the lines of a table: columns of numbers are aligned right, the others left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index < num_numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _reasons(left_out: Sequence[LeftOut]) -> list[str]:
    """Return a line for each number of microbatches and reason, with their placements."""
    shared: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for choice in left_out:
        shared[choice.num_microbatches, choice.reason].append(describe(choice.placement))
    return [
        f"left out: {count} microbatches ({'; '.join(where)}): {reason}"
        for (count, reason), where in shared.items()
    ]

"""The question that compared schedules answer: costs, shape, memory and clock."""

from dataclasses import dataclass

from penstock.costs.given_costs import GivenCosts
from penstock.costs.units import in_memory
from penstock.ir import Placement
from penstock.schedules.generator import Clock
from penstock.solver import Problem
from penstock.solver.gathered_search import GatherChoice
from penstock.timeline import Report


@dataclass(frozen=True, slots=True)
class Question:
    """The numbers that all schedules of a comparison share."""

    costs: GivenCosts
    num_ranks: int
    num_microbatches: int
    memory: float | tuple[float, ...] | None
    clock: Clock
    gathers: GatherChoice | None = None
    """The policy of gathers; None leaves schedules as they are."""
    recompute: bool = False
    """True if searches may recompute forwards."""

    def problem(self, placement: Placement) -> Problem:
        """Return the problem for schedules with this placement."""
        return Problem.of(
            self.costs.table(placement),
            placement,
            self.num_microbatches,
            memory=self.memory,
            clock=self.clock,
            recompute=self.recompute,
        )

    def describe_excess(self, problem: Problem, report: Report) -> str:
        """Describe the memory that a simulated schedule needs over a cap; empty if it fits."""
        over = problem.find_excess(report)
        if over is None:
            return ""
        needed = in_memory(report.ranks[over].peak_memory, self.costs.memory_unit)
        return f"needs {needed} on rank {over}"

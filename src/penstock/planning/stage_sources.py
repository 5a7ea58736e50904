"""Stages with their placement and costs, from a table of stages or from layers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from penstock.costs import CostTable, Level
from penstock.costs.cost_table import HELD
from penstock.errors import CostError, ScheduleError
from penstock.ir import Placement
from penstock.partition import Partition
from penstock.passes.held_memory import ROUNDING
from penstock.solver import Problem
from penstock.solver.placement_choices import default_placements
from penstock.solver.problem_checks import check_recompute


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a plan other than the model."""

    num_ranks: int
    memory: float
    """The memory of each rank; infinite if it is not limited."""
    delay: float
    overhead: float
    stages_per_rank: Sequence[int]
    bytes_per_parameter_byte: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A number of microbatches, and stages on ranks: everything except the schedule."""

    num_microbatches: int
    placement: Placement
    costs: CostTable
    caps: tuple[float, ...]
    """The most activation memory that each rank may hold."""
    parameter_memory: tuple[float, ...]
    partition: Partition | None
    cut_points: tuple[str, ...]
    levels: tuple[Level, ...] = ()
    """The memory level of each stage; none if no levels were given."""

    @property
    def shape(self) -> tuple[int, Placement]:
        return self.num_microbatches, self.placement

    @property
    def is_uniform(self) -> bool:
        """True if all stages have the same level."""
        return len(set(self.levels)) <= 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why there are no choices, and the memory per rank with which there would be."""

    reason: str
    least_memory: float = inf
    """The least memory per rank that would help; infinite if none would."""
    cut_points: tuple[str, ...] = ()
    """The cut that fits in `least_memory`."""

    @classmethod
    def for_memory(cls, least: float, cut_points: tuple[str, ...]) -> "Refusal":
        reason = f"a rank needs {least:.5g} of memory even with one microbatch at a time"
        return cls(reason, least, cut_points)


class AbstractSource(ABC):
    """A source of stages: a table, or layers to cut."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """The number of samples in the batch."""

    @property
    @abstractmethod
    def placements(self) -> list[Placement]:
        """The placements to choose from."""

    @abstractmethod
    def choices(self, num_microbatches: int, placement: Placement) -> list[Choice] | Refusal:
        """Return at least one choice that fits in memory, or the reason why there is none."""


class TableSource(AbstractSource):
    """Stages that are already cut, with costs measured for microbatches of one size."""

    def __init__(self, table: CostTable, mb_size: int, batch_size: int, request: Request) -> None:
        if table.num_microbatches is not None:
            raise CostError(
                f"The costs have scales for {table.num_microbatches} microbatches. A plan chooses "
                "the number of microbatches, all of one size: give costs without scales, and "
                "lengths if microbatches differ."
            )
        self._table, self._mb_size, self._batch_size = table, mb_size, batch_size
        self._request = request
        count, rest = divmod(table.num_stages, request.num_ranks)
        if rest or not count:
            raise ScheduleError(
                f"The costs are for {table.num_stages} stages, which cannot be divided evenly "
                f"among {request.num_ranks} ranks. Expected as many stages as ranks, or a "
                "multiple: measure such stages, or give the costs of layers, which are cut to fit."
            )
        self._stages_per_rank = count

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def placements(self) -> list[Placement]:
        return placements(self._request.num_ranks, [self._stages_per_rank])

    def choices(self, num_microbatches: int, placement: Placement) -> list[Choice] | Refusal:
        costs = self.costs(num_microbatches)
        least = least_memory(costs, placement)
        if least > self._request.memory * ROUNDING:
            return Refusal.for_memory(least, ())
        return [choose_stages(self._request, num_microbatches, placement, costs)]

    def costs(self, num_microbatches: int) -> CostTable:
        """Return the costs for one of `num_microbatches` microbatches of equal size."""
        request, table = self._request, self._table
        factor = self._batch_size / num_microbatches / self._mb_size
        return CostTable(
            forward=self._scale(table.forward, factor),
            backward_input=self._scale(table.backward_input, factor),
            backward_weight=self._scale(table.backward_weight, factor),
            backward=self._scale(table.backward, factor),
            recompute=self._scale(table.recompute, factor),
            **{name: [held * factor for held in getattr(table, name)] for name in HELD},
            delay=[max(delay, request.delay) for delay in table.delay],
            message_bytes=[size * factor for size in table.message_bytes],
            bandwidth=table.bandwidth,
            # Parameters do not depend on the size of microbatches.
            gather=table.gather,
            reduce=table.reduce,
            gathered=table.gathered,
            overlap_saving=table.overlap_saving,
        )

    def _scale(self, times: Sequence[float], factor: float) -> list[float]:
        """Return times for microbatches of another size; the overhead in them is not scaled."""
        fixed = [min(self._request.overhead, time) for time in times]
        return [part + (time - part) * factor for part, time in zip(fixed, times, strict=True)]


def choose_stages(
    request: Request,
    num_microbatches: int,
    placement: Placement,
    costs: CostTable,
    levels: tuple[Level, ...] = (),
) -> Choice:
    """Return the choice of stages that were given; all memory is for their activations."""
    caps = (request.memory,) * request.num_ranks
    nothing = (0.0,) * request.num_ranks
    return Choice(num_microbatches, placement, costs, caps, nothing, None, (), levels)


def least_memory(costs: CostTable, placement: Placement) -> float:
    """Return the memory per rank with which one microbatch at a time fits."""
    recompute = check_recompute("auto", costs)
    return max(Problem.of(costs, placement, 1, recompute=recompute).smallest_caps)


def placements(num_ranks: int, stages_per_rank: Sequence[int]) -> list[Placement]:
    """Return loops and Vs with these numbers of stages per rank; with one, both are linear."""
    found = [default_placements(num_ranks * count, num_ranks) for count in stages_per_rank]
    return list(dict.fromkeys(placement for some in found for placement in some))


def sum_by_rank(values: Sequence[float], placement: Placement) -> tuple[float, ...]:
    """Return the sums of the values of each rank's stages."""
    return tuple(
        sum(values[stage] for stage in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    )


def leave_for_activations(
    memory: float, parameter_memory: Sequence[float], least: Sequence[float]
) -> tuple[float, ...]:
    """Return the memory left on each rank, at least enough for one microbatch.

    One microbatch is known to fit.
    """
    if memory == inf:
        return (inf,) * len(least)
    pairs = zip(parameter_memory, least, strict=True)
    return tuple(max(memory - fixed, one) for fixed, one in pairs)

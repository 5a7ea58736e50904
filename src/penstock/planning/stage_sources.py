"""Stages on ranks with what they take, from a table of stages or from layers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from penstock.costs import CostTable
from penstock.errors import ScheduleError
from penstock.ir import Placement
from penstock.partition import Partition
from penstock.passes.held_memory import ROUNDING
from penstock.solver.placement_choices import default_placements


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, beside the model."""

    num_ranks: int
    memory: float
    """Of each rank; infinite if it does not matter."""
    delay: float
    overhead: float
    stages_per_rank: Sequence[int]
    bytes_per_parameter_byte: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A number of microbatches, and stages on ranks: all but the schedule."""

    num_microbatches: int
    placement: Placement
    costs: CostTable
    caps: tuple[float, ...]
    """What each rank may hold of activations."""
    parameter_memory: tuple[float, ...]
    partition: Partition | None
    cut_points: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there are no choices, and with how much memory on each rank there would be."""

    reason: str
    least_memory: float = inf
    """Infinite if more memory is no help."""
    cut_points: tuple[str, ...] = ()
    """The cut that fits in it."""

    @classmethod
    def for_memory(cls, least: float, cut_points: tuple[str, ...]) -> "Refusal":
        reason = f"a rank needs {least:.5g} of memory even with one microbatch at a time"
        return cls(reason, least, cut_points)


class AbstractSource(ABC):
    """Where stages come from."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Samples in the batch."""

    @property
    @abstractmethod
    def placements(self) -> list[Placement]:
        """Those to choose from."""

    @abstractmethod
    def choices(self, num_microbatches: int, placement: Placement) -> list[Choice] | Refusal:
        """The cuts that fit in memory, at least one."""


class TableSource(AbstractSource):
    """Stages as they are, with costs that were measured for microbatches of some size."""

    def __init__(self, table: CostTable, mb_size: int, batch_size: int, request: Request) -> None:
        self._table, self._mb_size, self._batch_size = table, mb_size, batch_size
        self._request = request
        count, rest = divmod(table.num_stages, request.num_ranks)
        if rest or not count:
            raise ScheduleError(
                f"The costs are of {table.num_stages} stages, which cannot be shared out evenly "
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
        request, table = self._request, self._table
        factor = self._batch_size / num_microbatches / self._mb_size
        costs = CostTable(
            forward=self._scale(table.forward, factor),
            backward_input=self._scale(table.backward_input, factor),
            backward_weight=self._scale(table.backward_weight, factor),
            backward=self._scale(table.backward, factor),
            after_forward=[held * factor for held in table.after_forward],
            after_input=[held * factor for held in table.after_input],
            delay=[max(delay, request.delay) for delay in table.delay],
            message_bytes=[size * factor for size in table.message_bytes],
            bandwidth=table.bandwidth,
            overlap_saving=table.overlap_saving,
        )
        least = max(sum_by_rank(costs.after_forward, placement))
        if least > request.memory * ROUNDING:
            return Refusal.for_memory(least, ())
        num_ranks = request.num_ranks
        caps, nothing = (request.memory,) * num_ranks, (0.0,) * num_ranks
        return [Choice(num_microbatches, placement, costs, caps, nothing, None, ())]

    def _scale(self, times: Sequence[float], factor: float) -> list[float]:
        """Times for other microbatches; the overhead is in them, and stays as it is."""
        fixed = [min(self._request.overhead, time) for time in times]
        return [part + (time - part) * factor for part, time in zip(fixed, times, strict=True)]


def placements(num_ranks: int, stages_per_rank: Sequence[int]) -> list[Placement]:
    """Loops and Vs with these numbers of stages on each rank; with one stage, both are a line."""
    found = [default_placements(num_ranks * count, num_ranks) for count in stages_per_rank]
    return list(dict.fromkeys(placement for some in found for placement in some))


def sum_by_rank(values: Sequence[float], placement: Placement) -> tuple[float, ...]:
    """What the stages of each rank have together."""
    return tuple(
        sum(values[stage] for stage in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    )


def leave_for_activations(
    memory: float, parameter_memory: Sequence[float], least: Sequence[float]
) -> tuple[float, ...]:
    """What is left on each rank, and no less than one microbatch takes, which is known to fit."""
    if memory == inf:
        return (inf,) * len(least)
    pairs = zip(parameter_memory, least, strict=True)
    return tuple(max(memory - fixed, one) for fixed, one in pairs)

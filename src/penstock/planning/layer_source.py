"""Stages cut from layers.

A cut minimises the time of the slowest rank, with memory as a limit. The number of microbatches
that a stage will hold is not known until there is a schedule, so several cuts are made:
[1] by time alone, if it fits with one microbatch on each rank;
[2] if memory may be the limit, also cuts that leave room for more microbatches: as many as 1F1B
    holds, one, half the number of ranks, and the number of ranks;
[3] if nothing else fits, the cut that takes the least memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, inf

from penstock.costs import CostTable
from penstock.cutting import LayerCost
from penstock.errors import PartitionError
from penstock.ir import Placement
from penstock.partition import MemoryLimit, Partition, balance
from penstock.passes.held_memory import ROUNDING
from penstock.planning.batch_layers import LayersOfBatch
from penstock.planning.stage_sources import (
    AbstractSource,
    Choice,
    Refusal,
    Request,
    leave_for_activations,
    placements,
    sum_by_rank,
)

_SLACK = 0.05  # As in `penstock.Balanced`.


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers at which stages may begin, with their time and memory for one microbatch."""

    names: tuple[str, ...]
    times: tuple[float, ...]
    fixed: tuple[float, ...]
    """The memory of parameters, and of the loss's backward, which runs for one at a time."""
    activations: tuple[float, ...]

    @classmethod
    def of(cls, costs: Sequence[LayerCost], bytes_per_parameter_byte: float) -> "_Layers":
        """Join layers that have the same name or none, such as a module that is called twice."""
        rows: dict[str, list[float]] = {}
        for cost in costs:
            fixed = cost.parameter_bytes * bytes_per_parameter_byte + cost.backward_bytes
            values = [cost.time, fixed, cost.activation_bytes]
            if rows and (cost.name in rows or not cost.name):
                last = rows[next(reversed(rows))]
                last[:] = [before + value for before, value in zip(last, values, strict=True)]
            else:
                rows[cost.name] = values
        times, fixed_bytes, activations = zip(*rows.values(), strict=True)
        return cls(tuple(rows), times, fixed_bytes, activations)

    @property
    def shares(self) -> tuple[float, ...]:
        """The times as shares of their sum, which are the same for microbatches of any size."""
        total = sum(self.times)
        return tuple(round(time / total, 12) if total else 0.0 for time in self.times)


class LayerSource(AbstractSource):
    """Layers that are cut into stages; their costs and cuts are computed once."""

    def __init__(self, layers: LayersOfBatch, request: Request) -> None:
        self._given = layers
        self._request = request
        self._layers: dict[int, _Layers] = {}
        self._known: dict[tuple[tuple[float, ...], Placement, float], tuple[int, ...]] = {}

    @property
    def batch_size(self) -> int:
        return self._given.batch_size

    @property
    def placements(self) -> list[Placement]:
        return placements(self._request.num_ranks, self._request.stages_per_rank)

    def choices(self, num_microbatches: int, placement: Placement) -> list[Choice] | Refusal:
        if num_microbatches not in self._layers:
            self._layers[num_microbatches] = _Layers.of(
                self._given.costs(num_microbatches), self._request.bytes_per_parameter_byte
            )
        layers = self._layers[num_microbatches]
        if len(layers.names) < placement.num_stages:
            return Refusal(
                f"{len(layers.names)} layers cannot be cut into {placement.num_stages} stages"
            )
        cuts = self._by_time(layers, placement)
        if self._request.memory < inf:
            weights = [sum(pair) for pair in zip(layers.fixed, layers.activations, strict=True)]
            lightest = balance(weights, placement.num_stages, placement=placement)
            if lightest.slowest > self._request.memory * ROUNDING:
                return Refusal.for_memory(lightest.slowest, _cut_points(layers, lightest.starts))
            cuts += self._by_memory(layers, num_microbatches, placement, cuts)
            cuts = cuts or [lightest.starts]  # [3]
        found = dict.fromkeys(cuts)  # Without duplicates.
        return [self._choice(layers, starts, num_microbatches, placement) for starts in found]

    def _by_time(self, layers: _Layers, placement: Placement) -> list[tuple[int, ...]]:
        """Return the cuts by time [1]; with two stages per rank, with and without slack."""
        found = []
        has_slack = placement.num_stages == 2 * placement.num_ranks
        for slack in (0.0, _SLACK) if has_slack else (0.0,):
            key = layers.shares, placement, slack
            if key not in self._known:
                cut = balance(key[0], placement.num_stages, placement=placement, slack=slack)
                self._known[key] = cut.starts
            if self._fits(layers, self._known[key], placement, (1,) * placement.num_stages):
                found.append(self._known[key])
        return found

    def _by_memory(
        self,
        layers: _Layers,
        num_microbatches: int,
        placement: Placement,
        by_time: Sequence[tuple[int, ...]],
    ) -> list[tuple[int, ...]]:
        """Return cuts with room for more microbatches [2], if the cuts by time lack it."""
        found = []
        for in_flight in _in_flight(placement, num_microbatches):
            if any(self._fits(layers, starts, placement, in_flight) for starts in by_time):
                continue
            limit = MemoryLimit(
                cap=self._request.memory,
                fixed=layers.fixed,
                per_microbatch=layers.activations,
                in_flight=in_flight,
            )
            with suppress(PartitionError):
                cut = balance(
                    layers.times,
                    placement.num_stages,
                    placement=placement,
                    memory=limit,
                    slack=_SLACK,
                )
                found.append(cut.starts)
        return found

    def _fits(
        self,
        layers: _Layers,
        starts: tuple[int, ...],
        placement: Placement,
        in_flight: Sequence[int],
    ) -> bool:
        fixed = Partition(starts, layers.fixed, placement).stage_costs
        held = Partition(starts, layers.activations, placement).stage_costs
        stages = [
            own + count * each for own, count, each in zip(fixed, in_flight, held, strict=True)
        ]
        return max(sum_by_rank(stages, placement)) <= self._request.memory * ROUNDING

    def _choice(
        self,
        layers: _Layers,
        starts: tuple[int, ...],
        num_microbatches: int,
        placement: Placement,
    ) -> Choice:
        """Return the stages of a cut; F, I and W each take a third of the time of a layer."""
        request, partition = self._request, Partition(starts, layers.times, placement)
        third = [time / 3 for time in partition.stage_costs]
        activations = Partition(starts, layers.activations, placement)
        parameter_memory = Partition(starts, layers.fixed, placement).rank_costs
        each = [time + request.overhead for time in third]
        costs = CostTable(
            forward=each,
            backward_input=each,
            backward_weight=each,
            backward=[2 * time + request.overhead for time in third],
            after_forward=activations.stage_costs,
            after_input=activations.stage_costs,
            delay=request.delay,
        )
        return Choice(
            num_microbatches=num_microbatches,
            placement=placement,
            costs=costs,
            caps=leave_for_activations(request.memory, parameter_memory, activations.rank_costs),
            parameter_memory=parameter_memory,
            partition=partition,
            cut_points=_cut_points(layers, starts),
        )


def _cut_points(layers: _Layers, starts: Sequence[int]) -> tuple[str, ...]:
    return tuple(layers.names[start] for start in starts[1:])


def _in_flight(placement: Placement, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """Yield how many microbatches each stage holds, for schedules that deserve their own cut."""
    num_ranks, num_stages = placement.num_ranks, placement.num_stages
    levels = [(count,) * num_stages for count in (1, ceil(num_ranks / 2), num_ranks)]
    if num_stages == num_ranks:
        levels.append(tuple(range(num_ranks, 0, -1)))
    for level in dict.fromkeys(levels):
        yield tuple(min(count, num_microbatches) for count in level)

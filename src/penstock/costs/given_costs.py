"""Costs as users give them: for a rank's share of the model, or for the stages in a file."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil
from statistics import fmean
from typing import Any, TypeAlias

from penstock.costs import CostTable
from penstock.costs.cost_table import HELD
from penstock.costs.lengths import Lengths, Work, scales_of
from penstock.costs.units import MemoryUnit, TimeUnit
from penstock.ir import Placement, Schedule


@dataclass(frozen=True, slots=True)
class ShareCosts:
    """Times and memory of a rank's whole share of the model, however many stages it has.

    Each is one number for all ranks, or several along the model, from its first layers to its last:
    with 1, 1 and 4 the last third costs four times as much as the others, whichever ranks hold it.

    >>> ShareCosts(forward=(1.0, 1.0, 4.0)).table(Placement.linear(3)).forward
    (1.0, 1.0, 4.0)
    >>> ShareCosts(forward=(1.0, 1.0, 4.0)).table(Placement.v(3)).forward
    (0.5, 0.5, 0.5, 0.5, 2.0, 2.0)
    """

    forward: tuple[float, ...] = (1.0,)
    backward_input: tuple[float, ...] = (1.0,)
    backward_weight: tuple[float, ...] = (1.0,)
    backward: tuple[float, ...] | None = None
    """The time of full backwards; if not given, the sum of their halves."""
    after_forward: tuple[float, ...] = (1.0,)
    after_input: tuple[float, ...] = (1.0,)
    during_forward: tuple[float, ...] = (0.0,)
    during_input: tuple[float, ...] = (0.0,)
    during_weight: tuple[float, ...] = (0.0,)
    during_backward: tuple[float, ...] = (0.0,)
    delay: float = 0.0
    gather: tuple[float, ...] = (0.0,)
    reduce: tuple[float, ...] = (0.0,)
    gathered: tuple[float, ...] = (0.0,)
    recompute: tuple[float, ...] | None = None
    """The time of recomputations; if not given, that of forwards."""
    after_dropping: tuple[float, ...] = (0.0,)
    during_dropping: tuple[float, ...] | None = None
    """If not given, that of forwards, and so is the next."""
    during_recompute: tuple[float, ...] | None = None
    overlap_saving: float = 0.0
    time_scale: tuple[tuple[float, ...], ...] = ()
    """By part of the model and microbatch; see `CostTable`. Empty if all microbatches are alike."""
    memory_scale: tuple[float, ...] = ()
    time_unit: TimeUnit = ""
    memory_unit: MemoryUnit = ""
    schedule: None = None

    def table(self, placement: Placement) -> CostTable:
        """Return the costs of the stages."""
        held: Any = {name: getattr(self, name) for name in HELD}
        return CostTable(
            forward=_along(self.forward, placement),
            backward_input=_along(self.backward_input, placement),
            backward_weight=_along(self.backward_weight, placement),
            backward=None if self.backward is None else _along(self.backward, placement),
            **{name: _along(row, placement) for name, row in held.items() if row is not None},
            delay=self.delay,
            gather=_along(self.gather, placement),
            reduce=_along(self.reduce, placement),
            gathered=_along(self.gathered, placement),
            recompute=None if self.recompute is None else _along(self.recompute, placement),
            overlap_saving=self.overlap_saving,
            time_scale=self._time_scale(placement),
            memory_scale=self.memory_scale,
        )

    @property
    def num_microbatches(self) -> int | None:
        """The number of microbatches that have scales; None if all are alike, however many."""
        return len(self.memory_scale or next(iter(self.time_scale), ())) or None

    def for_lengths(self, lengths: Lengths, work: Work) -> "ShareCosts":
        """Return the same costs for microbatches of these lengths; see `CostTable.for_lengths`."""
        times, tokens = scales_of(lengths, None, work)
        return replace(self, time_scale=(times,), memory_scale=tokens)

    def _time_scale(self, placement: Placement) -> list[tuple[float, ...]]:
        """Return the scales of each stage: the mean over the parts of the model that it covers."""
        covered = _along((1.0,), placement)
        columns = [_along(column, placement) for column in zip(*self.time_scale, strict=True)]
        return [
            tuple(value / whole for value in row)
            for row, whole in zip(zip(*columns, strict=True), covered, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class TableCosts:
    """The costs of given stages."""

    costs: CostTable
    time_unit: TimeUnit = ""
    schedule: Schedule | None = None
    """The schedule that was recorded, if the costs are from a recording."""
    memory_unit: MemoryUnit = ""
    of_gathers: tuple[float, float, float] | None = None
    """The `gather`, `reduce` and `gathered` of a rank's whole share, in place of the table's."""

    def table(self, placement: Placement) -> CostTable:
        """Return the costs of the stages, shared out along the model if their number differs.

        >>> costs = TableCosts(CostTable.uniform(2, forward=3.0))
        >>> costs.table(Placement.v(2)).forward
        (1.5, 1.5, 1.5, 1.5)
        """
        table = self.costs
        if placement.num_stages != table.num_stages:
            table = self.shares(placement.num_ranks).table(placement)
        if self.of_gathers is None:
            return table
        gather, reduce, gathered = (tuple(_along((v,), placement)) for v in self.of_gathers)
        return replace(table, gather=gather, reduce=reduce, gathered=gathered)

    def shares(self, num_ranks: int) -> ShareCosts:
        """Return the same costs along the model, for the shares of `num_ranks` ranks."""
        costs = self.costs
        per_rank = costs.num_stages / num_ranks

        def along(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(value * per_rank for value in values)

        held: Any = {name: along(getattr(costs, name)) for name in HELD}
        return ShareCosts(
            forward=along(costs.forward),
            backward_input=along(costs.backward_input),
            backward_weight=along(costs.backward_weight),
            backward=along(costs.backward),
            **held,
            delay=self._mean_delay(),
            gather=along(costs.gather),
            reduce=along(costs.reduce),
            gathered=along(costs.gathered),
            recompute=along(costs.recompute),
            overlap_saving=costs.overlap_saving,
            time_scale=costs.time_scale,
            memory_scale=costs.memory_scale,
            time_unit=self.time_unit,
            memory_unit=self.memory_unit,
        )

    @property
    def num_microbatches(self) -> int | None:
        """See `ShareCosts`."""
        return self.costs.num_microbatches

    def for_lengths(self, lengths: Lengths, work: Work) -> "TableCosts":
        """Return the same costs for microbatches of these lengths; see `CostTable.for_lengths`."""
        return replace(self, costs=self.costs.for_lengths(lengths, work=work))

    def _mean_delay(self) -> float:
        """Return the mean time of a message between ranks, over the edges."""
        costs = self.costs
        # If the placement is not known, assume one stage per rank.
        ranks = range(costs.num_stages) if self.schedule is None else self.schedule.placement.ranks
        between_ranks = [
            delay + transfer
            for delay, transfer, ends in zip(
                costs.delay, costs.transfer, pairwise(ranks), strict=True
            )
            if ends[0] != ends[1]
        ]
        return fmean(between_ranks) if between_ranks else 0.0


GivenCosts: TypeAlias = ShareCosts | TableCosts
"""Costs as they are given; `table(placement)` returns those of each stage."""


def with_delay(costs: CostTable, delay: float | None) -> CostTable:
    """Return the costs with `delay` in place of their own delays, if it is given."""
    if delay is None:
        return costs
    return replace(costs, delay=(delay,) * (costs.num_stages - 1))


def _along(values: Sequence[float], placement: Placement) -> list[float]:
    """Return the share of each stage in values that are given along the model.

    Each value holds for an equal part of the model. Each rank has an equal share of the model, and
    its stages share that equally: with 2 values, and 3 ranks with a stage each, the second
    stage gets half of each value.

        values     |     a     |     b     |
        stages     |   0   |   1   |   2   |
    """
    counts = Counter(placement.ranks)
    shares = [Fraction(1, counts[rank]) for rank in placement.ranks]
    per_share = Fraction(len(values), placement.num_ranks)  # Values that a share covers.
    ends = [end * per_share for end in accumulate(shares, initial=Fraction(0))]
    return [
        sum(
            values[part] * float(_overlap(start, end, part) / per_share)
            for part in range(int(start), ceil(end))
        )
        for start, end in pairwise(ends)
    ]


def _overlap(start: Fraction, end: Fraction, part: int) -> Fraction:
    return min(end, Fraction(part + 1)) - max(start, Fraction(part))

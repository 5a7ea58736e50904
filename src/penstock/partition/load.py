"""The loads of stages in whole units, so that sums are exact and do not depend on their order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from penstock.ir.placement import Placement


@dataclass(frozen=True, slots=True)
class Load:
    """Running sums over the layers: stage s with layers i to j - 1 carries
    `sums[s][j] - sums[s][i]` units.

    The same layer may weigh more on one stage than on another.
    """

    sums: tuple[tuple[int, ...], ...]
    least: tuple[int, ...]
    """Running sums if each layer is on the stage where it weighs least."""
    unit: Fraction

    @classmethod
    def of(cls, layers_by_stage: Sequence[Sequence[Fraction]]) -> "Load":
        """Count the weight of each layer on each stage in the largest unit that fits them all."""
        values = {value for layers in layers_by_stage for value in layers}
        scale = math.lcm(*(value.denominator for value in values))
        step = math.gcd(*(int(value * scale) for value in values)) or 1
        unit = Fraction(step, scale)
        counts = {value: int(value / unit) for value in values}
        by_stage = [[counts[value] for value in layers] for layers in layers_by_stage]
        return cls(
            sums=tuple(_add_up(layers) for layers in by_stage),
            least=_add_up(list(map(min, zip(*by_stage, strict=True)))),
            unit=unit,
        )

    @property
    def num_stages(self) -> int:
        return len(self.sums)

    @property
    def num_layers(self) -> int:
        return len(self.least) - 1

    def of_stages(self, starts: Sequence[int]) -> list[int]:
        """Return what each stage carries if its first layer is the one in `starts`."""
        ends = [*starts[1:], self.num_layers]
        return [
            sums[end] - sums[start]
            for sums, start, end in zip(self.sums, starts, ends, strict=True)
        ]

    def of_ranks(self, starts: Sequence[int], placement: Placement) -> list[int]:
        """Return what each rank carries: the loads of all of its stages."""
        by_stage = self.of_stages(starts)
        return [
            sum(by_stage[stage] for stage in placement.stages_of(rank))
            for rank in range(placement.num_ranks)
        ]

    def to_float(self, units: int) -> float:
        """Return the load as a float, rounded up."""
        exact = units * self.unit
        nearest = float(exact)
        return nearest if nearest >= exact else math.nextafter(nearest, math.inf)


def _add_up(layers: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(layers, initial=0))


@dataclass(frozen=True, slots=True)
class Limit:
    """A second load, of which no rank may carry more than `most` units."""

    load: Load
    most: int

    @classmethod
    def none(cls, load: Load) -> "Limit":
        """Return a limit that every cut of the layers and stages of `load` meets."""
        nothing = [[Fraction(0)] * load.num_layers] * load.num_stages
        return cls(Load.of(nothing), 0)

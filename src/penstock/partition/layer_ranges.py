"""The layers of each stage."""

import math
from dataclasses import dataclass

from penstock.ir.placement import Placement


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers cut into stages, and their costs; made by `balance`."""

    starts: tuple[int, ...]
    """The first layer of each stage."""
    costs: tuple[float, ...]
    """The cost of each layer."""
    placement: Placement
    speeds: tuple[float, ...] = ()
    """The speed of each rank; empty if all are 1."""

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    def layers_of(self, stage: int) -> range:
        """Return the layers of `stage`; never empty."""
        ends = (*self.starts[1:], len(self.costs))
        return range(self.starts[stage], ends[stage])

    @property
    def stage_costs(self) -> tuple[float, ...]:
        return tuple(
            math.fsum(self.costs[layer] for layer in self.layers_of(stage)) / self._speed(rank)
            for stage, rank in enumerate(self.placement.ranks)
        )

    @property
    def rank_costs(self) -> tuple[float, ...]:
        """The cost of each rank: that of all of its stages."""
        return tuple(
            math.fsum(
                self.costs[layer]
                for stage in self.placement.stages_of(rank)
                for layer in self.layers_of(stage)
            )
            / self._speed(rank)
            for rank in range(self.placement.num_ranks)
        )

    @property
    def slowest(self) -> float:
        """The cost of the slowest rank, which the others wait for."""
        return max(self.rank_costs)

    def _speed(self, rank: int) -> float:
        return self.speeds[rank] if self.speeds else 1.0

"""The memory that a rank has, and the memory that the layers take."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from penstock.errors import CostError
from penstock.partition.checked_floats import to_float, to_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The cap of each rank, and the memory that the layers take; all in one unit.

    A stage takes the `fixed` of its layers (weights, gradients, optimizer state) and, for each
    microbatch in flight, their `per_microbatch` (activations). A rank takes what its stages take.
    The number of microbatches in flight on a stage depends on the schedule.
    """

    cap: float
    fixed: tuple[float, ...]
    """One value per layer."""
    per_microbatch: tuple[float, ...]
    """One value per layer."""
    in_flight: tuple[float, ...] | float
    """The number of microbatches at a time: one per stage, or one for all."""

    def __init__(
        self,
        *,
        cap: float,
        fixed: Iterable[float],
        per_microbatch: Iterable[float] | float = 0.0,
        in_flight: Iterable[float] | float = 1,
    ) -> None:
        each_fixed = to_floats("fixed", fixed, per="layer")
        if not isinstance(per_microbatch, Iterable):
            per_microbatch = [per_microbatch] * len(each_fixed)
        each = to_floats("per_microbatch", per_microbatch, per="layer")
        if len(each) != len(each_fixed):
            raise CostError(
                f"per_microbatch has {len(each)} values, but fixed has {len(each_fixed)}. "
                "Expected one per layer in both, or one number for all layers."
            )
        object.__setattr__(self, "cap", to_float("cap", cap))
        object.__setattr__(self, "fixed", each_fixed)
        object.__setattr__(self, "per_microbatch", each)
        object.__setattr__(
            self,
            "in_flight",
            to_floats("in_flight", in_flight, per="stage")
            if isinstance(in_flight, Iterable)
            else to_float("in_flight", in_flight),
        )

    def by_stage(self, num_layers: int, num_stages: int) -> list[list[Fraction]]:
        """Return the exact memory of each layer on each stage."""
        if len(self.fixed) != num_layers:
            raise CostError(
                f"memory.fixed has {len(self.fixed)} values, but costs has {num_layers}. "
                "Expected one per layer in both."
            )
        in_flight = self.in_flight
        if not isinstance(in_flight, tuple):
            in_flight = (in_flight,) * num_stages
        if len(in_flight) != num_stages:
            raise CostError(
                f"memory.in_flight has {len(in_flight)} values, but num_stages is {num_stages}. "
                "Expected one per stage, or one number for all stages."
            )
        if max(in_flight) * sum(self.per_microbatch) + sum(self.fixed) == math.inf:
            raise CostError(
                "The memory of all layers together is infinite. Give it in a larger unit."
            )
        fixed = [Fraction(value) for value in self.fixed]
        per_microbatch = [Fraction(value) for value in self.per_microbatch]
        return [
            [base + count * share for base, share in zip(fixed, per_microbatch, strict=True)]
            for count in map(Fraction, in_flight)
        ]

"""The codes of actions, and tables of them by microbatch."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.costs import CostTable
from penstock.passes.held_memory import Change

FORWARD, INPUT, WEIGHT, FULL = range(4)


class Named(NamedTuple):
    """Tables by codes that name microbatches: code + 4 * num_stages * microbatch.

    If microbatches are alike, all are counted as microbatch 0, and these are the codes of orders.
    Those of recomputations follow after all others, also by microbatch.
    """

    kinds: tuple[int, ...]
    stages: tuple[int, ...]
    times: tuple[float, ...]
    changes: tuple[Change, ...]

    @classmethod
    def of(cls, durations: Sequence[float], changes: Sequence[Change], costs: CostTable) -> "Named":
        """Return the tables for times and changes by code, before the scales of microbatches."""
        codes, mbs = range(len(durations)), range(costs.num_microbatches or 1)
        paces, sizes = costs.time_scale, costs.memory_scale
        return cls(
            kinds=tuple(code & 3 for _ in mbs for code in codes),
            stages=tuple(code >> 2 for _ in mbs for code in codes),
            times=tuple(
                durations[code] * paces[code >> 2][mb] if paces else durations[code]
                for mb in mbs
                for code in codes
            ),
            changes=tuple(
                change.times(sizes[mb]) if sizes else change for mb in mbs for change in changes
            ),
        )

    def with_recomputations(
        self, costs: CostTable, changes: Sequence[Change], num_microbatches: int
    ) -> "Named":
        """Return the tables with those of recomputations after them; `changes` are by stage."""
        mbs, stages = range(num_microbatches), range(costs.num_stages)
        paces, sizes, nothing = costs.time_scale, costs.memory_scale, Change(0.0, 0.0)
        blank = [(kind, 0, 0.0, nothing) for kind in (FORWARD, INPUT, FULL)]
        rows = [
            row
            for mb in mbs
            for s in stages
            for row in (
                *blank[:2],
                (
                    WEIGHT,
                    s,
                    costs.recompute[s] * (paces[s][mb] if paces else 1),
                    changes[s].times(sizes[mb] if sizes else 1),
                ),
                blank[2],
            )
        ]
        kinds, of_stages, durations, nets = zip(*rows, strict=True)
        return Named(
            kinds=self.kinds + kinds,
            stages=self.stages + of_stages,
            times=self.times + durations,
            changes=self.changes + nets,
        )

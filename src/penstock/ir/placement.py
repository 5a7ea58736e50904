"""The assignment of stages to ranks."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.ir.message import Rank, StageId


@dataclass(frozen=True, slots=True)
class Placement:
    """The assignment of stages to ranks: stage s is on `ranks[s]`.

    Any assignment will do as long as every rank from 0 to the largest holds a stage.

    >>> Placement.v(3)
    Placement(ranks=(0, 1, 2, 2, 1, 0))
    """

    ranks: tuple[Rank, ...]

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise ScheduleError(
                f"ranks is {ranks!r}. Expected the rank of each stage, such as [0, 1]; "
                f"for one stage per rank, use Placement.linear({ranks!r})."
            )
        held = tuple(ranks)
        _check(held)
        object.__setattr__(self, "ranks", held)

    @classmethod
    def linear(cls, num_ranks: int) -> "Placement":
        """Return the placement with one stage per rank: 0, 1, 2, …"""
        return cls.loop(num_ranks, stages_per_rank=1)

    @classmethod
    def loop(cls, num_ranks: int, *, stages_per_rank: int) -> "Placement":
        """Return the placement that starts again at rank 0 after the last: 0, 1, 2, 0, 1, 2, …"""
        return cls(list(range(num_ranks)) * stages_per_rank)

    @classmethod
    def v(cls, num_ranks: int, *, stages_per_rank: int = 2) -> "Placement":
        """Return the placement there and back: 0, 1, 2, 2, 1, 0; more stages per rank add legs."""
        there = list(range(num_ranks))
        legs = [there if leg % 2 == 0 else there[::-1] for leg in range(stages_per_rank)]
        return cls(rank for leg in legs for rank in leg)

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    def stages_of(self, rank: int) -> tuple[StageId, ...]:
        """Return the stages that `rank` holds, in ascending order."""
        return tuple(stage for stage, holder in enumerate(self.ranks) if holder == rank)


def _check(ranks: tuple[Rank, ...]) -> None:
    if not ranks:
        raise ScheduleError(
            "The placement has no stage. "
            "Give the rank of each stage, such as Placement([0, 1]) or Placement.linear(2)."
        )
    for stage, rank in enumerate(ranks):
        if not isinstance(rank, int):
            raise ScheduleError(
                f"Stage {stage} is placed on rank {rank!r}. Ranks are whole numbers from 0."
            )
    if min(ranks) < 0:
        raise ScheduleError(
            f"Stage {ranks.index(min(ranks))} is placed on rank {min(ranks)}. "
            "Ranks are numbered from 0."
        )
    used = set(ranks)
    # A rank beyond the number of stages leaves a smaller one empty, so this need not look further.
    for rank in range(min(max(ranks), len(ranks))):
        if rank not in used:
            raise ScheduleError(
                f"Rank {rank} holds no stage, but rank {max(ranks)} does. "
                "Every rank up to the largest must hold at least one: leave no number out."
            )

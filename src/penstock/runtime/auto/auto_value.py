"""`Auto(...)`: a value for `schedule=` that asks for a schedule made from measured costs."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from penstock.errors import StageError
from penstock.passes.held_memory import cap_of_each_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """A schedule to find while training: measure the first steps, then search for the best one.

    Each rank may hold `memory` bytes for its microbatches, counted as if all held alike: a number,
    or one for each rank. Times
    are measured in `measure_steps` steps with split and as many with full backwards, and the
    search takes at most `seconds`. With `replan_when=0.2`, all of this is done again when times
    have changed by more than 20 %. A rank or link that has become slower than planned by more than
    `slow_when`, 0.5 for 50 %, is named in the log with what it costs. With
    `recompute=True`, recomputations are measured too, and the schedule may have some where they
    save time within `memory`.

    >>> Auto(memory=2e9)
    Auto(memory=2000000000.0, replan_when=None, measure_steps=1, seconds=10.0, recompute=False, \
slow_when=0.5)
    """

    memory: float | Iterable[float] | None = None
    replan_when: float | None = None
    measure_steps: int = 1
    seconds: float = 10.0
    recompute: bool = False
    slow_when: float | None = 0.5

    def __post_init__(self) -> None:
        memory = _plain(self.memory)
        object.__setattr__(self, "memory", memory)
        caps = memory if isinstance(memory, tuple) else (memory,)
        if memory is not None and not all(map(_is_positive, caps)):
            raise StageError(
                f"memory is {memory!r}. Expected bytes that a rank may hold for its "
                "microbatches: a positive number, or one for each rank."
            )
        if self.replan_when is not None and not _is_positive(self.replan_when):
            raise StageError(
                f"replan_when is {self.replan_when!r}. Expected a share such as 0.2, to plan again "
                "when times have changed by more than 20 %, or None."
            )
        check_share(self.slow_when)
        if not isinstance(self.measure_steps, Integral) or int(self.measure_steps) < 1:
            raise StageError(
                f"measure_steps is {self.measure_steps!r}. Expected a whole number, at least 1."
            )
        if not _is_positive(self.seconds):
            raise StageError(f"seconds is {self.seconds!r}. Expected a positive number.")
        if not isinstance(self.recompute, bool):
            raise StageError(f"recompute is {self.recompute!r}. Expected True or False.")
        if self.recompute and memory is None:
            raise StageError(
                "recompute is True, but memory is None. Without a limit, nothing is gained by "
                "recomputing forwards. Give the bytes that a rank may hold, or leave recompute out."
            )

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    def caps(self, num_ranks: int) -> tuple[float, ...] | None:
        """Return the memory of each rank."""
        return None if self.memory is None else cap_of_each_rank("memory", self.memory, num_ranks)


def check_share(slow_when: Any) -> None:
    """Raise an error unless it is a share, or None."""
    if slow_when is not None and not _is_positive(slow_when):
        raise StageError(
            f"slow_when is {slow_when!r}. Expected a share such as 0.5, to name ranks and links "
            "that take more than 50 % longer than planned, or None."
        )


def _plain(memory: Any) -> Any:
    """Return floats for numbers of any kind, so that ranks with equal values agree."""
    if isinstance(memory, Iterable) and not isinstance(memory, str | bytes | Mapping | Set):
        try:
            return tuple(map(_plain, memory))
        except TypeError:  # A zero-dimensional array.
            return float(memory)  # type: ignore[arg-type]
    return float(memory) if isinstance(memory, Real) else memory


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0

"""The shape of a schedule that is given by its name, as a value, or as "auto"."""

from typing import Any, Final, NamedTuple

from penstock.ir import Placement, Schedule

AUTO: Final = "auto"
"""The name of a schedule that is found while training."""


class Mismatch(NamedTuple):
    """A number that was given beside a schedule, which has another one."""

    name: str
    given: int
    found: int


def is_auto(schedule: Any) -> bool:
    """Return whether this is the name "auto", in any case."""
    return isinstance(schedule, str) and schedule.lower() == AUTO


def placement_of_auto(num_ranks: int, stages_per_rank: int | None) -> Placement:
    """Return a V: rank 0 has the first and last stages, so no rank only waits.

    >>> placement_of_auto(2, None).num_stages
    4
    """
    return Placement.v(num_ranks, stages_per_rank=2 if stages_per_rank is None else stages_per_rank)


def find_mismatch(
    schedule: Schedule,
    *,
    num_ranks: int,
    num_microbatches: int | None,
    stages_per_rank: int | None,
) -> Mismatch | None:
    """Return the first number that the schedule is not for; None stands for its own number."""
    for name, given, found in (
        ("num_ranks", num_ranks, schedule.num_ranks),
        ("num_microbatches", num_microbatches, schedule.num_microbatches),
        ("stages_per_rank", stages_per_rank, schedule.num_stages // schedule.num_ranks),
    ):
        if given is not None and given != found:
            return Mismatch(name, given, found)
    return None

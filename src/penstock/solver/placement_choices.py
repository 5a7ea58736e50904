"""The placements to choose from, and their descriptions."""

from collections.abc import Iterable

from penstock.errors import ScheduleError
from penstock.ir import Placement


def default_placements(num_stages: int, num_ranks: int) -> list[Placement]:
    """Return the placements for these numbers: linear for one stage per rank, else loop and V."""
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise ScheduleError(f"num_ranks is {num_ranks!r}. Expected a whole number, at least 1.")
    count, rest = divmod(num_stages, num_ranks)
    if rest or not count:
        raise ScheduleError(
            f"The costs are for {num_stages} stages, which cannot be divided evenly among "
            f"{num_ranks} ranks. Give as many stages as ranks or a multiple, or placements."
        )
    found = (
        Placement.loop(num_ranks, stages_per_rank=count),
        Placement.v(num_ranks, stages_per_rank=count),
    )
    return list(dict.fromkeys(found))  # They may be the same.


def check_placements(placements: Iterable[Placement], num_ranks: int) -> list[Placement]:
    if isinstance(placements, Placement):
        raise ScheduleError(
            f"placements is {placements!r}. Expected several to choose from: give a list."
        )
    chosen = list(placements)
    if not chosen:
        raise ScheduleError("placements is empty. Give at least one, or leave it out.")
    for placement in chosen:
        if not isinstance(placement, Placement) or placement.num_ranks != num_ranks:
            raise ScheduleError(
                f"placements holds {placement!r}. Expected a Placement on {num_ranks} ranks, such "
                f"as Placement.linear({num_ranks})."
            )
    return chosen


def describe(placement: Placement) -> str:
    """Return a placement in a word or two."""
    num_ranks = placement.num_ranks
    count, rest = divmod(placement.num_stages, num_ranks)
    if not rest:
        if placement == Placement.loop(num_ranks, stages_per_rank=count):
            return "linear" if count == 1 else f"loop, {count} per rank"
        if placement == Placement.v(num_ranks, stages_per_rank=count):
            return f"V, {count} per rank"
    return "own"

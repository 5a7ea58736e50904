"""Checks of the arguments that describe a problem."""

from math import inf
from numbers import Real
from typing import Literal, TypeAlias, get_args

from penstock.costs import CostTable
from penstock.costs.microbatch_scales import check_microbatches
from penstock.errors import CostError, ScheduleError
from penstock.ir import Placement
from penstock.schedules.generator import Clock

RecomputeChoice: TypeAlias = bool | Literal["auto"]
"""Whether forwards may be recomputed; with `"auto"`, if the costs say what that needs."""


def check_problem(
    costs: CostTable, placement: Placement, num_microbatches: int, clock: Clock
) -> None:
    """Raise an error for arguments that describe no problem."""
    check_costs(costs)
    if not isinstance(placement, Placement):
        raise ScheduleError(
            f"placement is {placement!r}. Expected a Placement, such as Placement.v(2)."
        )
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ScheduleError(
            f"num_microbatches is {num_microbatches!r}. Expected a whole number, at least 1."
        )
    if placement.num_stages != costs.num_stages:
        raise CostError(
            f"The costs are for {costs.num_stages} stages, but the placement has "
            f"{placement.num_stages}. Give costs for each stage."
        )
    check_microbatches(costs.num_microbatches, num_microbatches)
    if clock not in get_args(Clock):
        raise ScheduleError(f"clock is {clock!r}. Expected 'makespan' or 'span'.")
    # Otherwise a schedule could delay a rank's start, and the rank's offset would not be known.
    num_ranks = placement.num_ranks
    first_stages = [placement.stages_of(rank)[0] for rank in range(num_ranks)]
    if clock == "span" and max(first_stages) >= num_ranks:
        raise ScheduleError(
            f"clock is 'span', but rank {first_stages.index(max(first_stages))} has its first "
            f"stage, {max(first_stages)}, after another rank's second. Expected a placement in "
            f"which every rank has one of the first {num_ranks} stages: linear, a loop or a V. "
            "Or use 'makespan'."
        )


def check_costs(costs: CostTable) -> None:
    """Raise an error for what is not a table of costs."""
    if not isinstance(costs, CostTable):
        raise CostError(f"costs is {costs!r}. Expected a penstock.CostTable.")


def check_positive(name: str, value: float) -> None:
    """Raise an error for what is not a finite number above 0."""
    if not isinstance(value, Real) or not 0 < value < inf:
        raise ScheduleError(f"{name} is {value!r}. Expected a finite number above 0.")


def check_recompute(recompute: RecomputeChoice, costs: CostTable) -> bool:
    """Return whether forwards may be recomputed."""
    if recompute == "auto":
        return knows_dropping(costs)
    if not isinstance(recompute, bool):
        raise ScheduleError(f"recompute is {recompute!r}. Expected True, False or 'auto'.")
    return recompute


def knows_dropping(costs: CostTable) -> bool:
    """Return whether costs say what a dropped forward holds; where none was measured, all is."""
    pairs = zip(costs.after_dropping, costs.after_forward, strict=True)
    return any(0 < dropped < kept for dropped, kept in pairs)

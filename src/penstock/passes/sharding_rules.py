"""The rules of gathers, frees and reductions: gathered where needed, reduced once at the end."""

from penstock.ir import (
    Action,
    Backward,
    BackwardWeight,
    Rank,
    ReduceGrads,
    Reshard,
    Schedule,
    StageId,
    Unshard,
)
from penstock.ir.action import compute_parts, gathered_stages
from penstock.ir.excerpts import error_at


def check_sharding(schedule: Schedule) -> None:
    """Raise an error at the first broken rule; actions must be complete and on their ranks."""
    for rank in range(schedule.num_ranks):
        _check_gathers(schedule, rank)
        _check_reductions(schedule, rank)


def _check_gathers(schedule: Schedule, rank: Rank) -> None:
    """Check that stages are gathered where they are needed; they may stay so at the end.

    Stages that the order neither gathers nor frees are not sharded.
    """
    order = schedule.orders[rank]
    freed = {action.stage for action in order if isinstance(action, Unshard | Reshard)}
    gathered: set[StageId] = set()
    for position, action in enumerate(order):
        fault = _find_fault(action, freed, gathered)
        if fault is not None:
            raise error_at(schedule.orders, rank, position, *fault)


def _find_fault(
    action: Action, freed: set[StageId], gathered: set[StageId]
) -> tuple[str, str] | None:
    """Return what is wrong with `action`, and the rule; or note what it gathers or frees."""
    if isinstance(action, Unshard):
        if action.stage in gathered:
            return (
                f"{action} gathers stage {action.stage}, which is gathered already",
                f"Free it first with {Reshard(action.stage)}, or remove the gather.",
            )
        freed.remove(action.stage)
        gathered.add(action.stage)
    elif isinstance(action, Reshard):
        if action.stage in freed:
            return (
                f"{action} frees stage {action.stage}, which is not gathered",
                f"Gather it first with {Unshard(action.stage)}, or remove the free.",
            )
        gathered.remove(action.stage)
        freed.add(action.stage)
    else:
        for stage in gathered_stages(action):
            if stage in freed:
                return (
                    f"{action} runs while stage {stage} is not gathered",
                    "Forwards, recomputations, full and input backwards need the parameters of "
                    f"their stage. Put {Unshard(stage)} before it, or move {Reshard(stage)} after "
                    "it.",
                )
    return None


def _check_reductions(schedule: Schedule, rank: Rank) -> None:
    """Check that gradients are reduced at most once, and when they are complete."""
    order = schedule.orders[rank]
    last: dict[StageId, int] = {}
    for position, action in enumerate(order):
        for part in compute_parts(action):
            if isinstance(part, Backward | BackwardWeight):
                last[part.stage] = position
    reduced: set[StageId] = set()
    for position, action in enumerate(order):
        if not isinstance(action, ReduceGrads):
            continue
        wrong = ""
        if action.stage in reduced:
            wrong = f"{action} repeats a reduction that is already done"
        elif action.stage not in last:
            wrong = f"{action} has no gradients to reduce"
        elif position < last[action.stage]:
            wrong = f"{action} runs before {order[last[action.stage]]}"
        if wrong:
            raise error_at(
                schedule.orders,
                rank,
                position,
                wrong,
                "The gradients of a stage are reduced at most once in a step, after its last B or "
                "W. Move it after that, or remove it.",
            )
        reduced.add(action.stage)

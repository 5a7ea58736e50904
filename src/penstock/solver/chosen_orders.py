"""What a schedule recomputes, and in which order its microbatches run."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from penstock.ir import Forward, MicrobatchId, Schedule
from penstock.ir.action import URGENT_BACKWARD_TYPES, compute_parts, recomputed_by


def count_recomputed(schedule: Schedule) -> tuple[int, ...]:
    """Return for how many microbatches the forward of each stage is recomputed.

    >>> count_recomputed(Schedule.from_csv("0F0,0R0,0B0\\n1F0,1B0\\n"))
    (1, 0)
    """
    again = Counter(stage for order in schedule.orders for stage, _ in recomputed_by(order))
    return tuple(again[stage] for stage in range(schedule.placement.num_stages))


def forward_order(schedule: Schedule) -> tuple[MicrobatchId, ...]:
    """Return the microbatches in the order of their forwards on the first stage."""
    return _order_of(schedule, (Forward,))


def backward_order(schedule: Schedule) -> tuple[MicrobatchId, ...]:
    """Return the microbatches in the order of their backwards on the first stage."""
    return _order_of(schedule, URGENT_BACKWARD_TYPES)


def describe_recomputed(schedule: Schedule) -> str:
    """Return in a sentence what is recomputed.

    >>> text = "0F0,0F1,0R0,0B0,0B1\\n1F0,1F1,1B0,1B1\\n"
    >>> describe_recomputed(Schedule.from_csv(text))
    'Rank 0 recomputes: 1 of 2 forwards of stage 0.'
    """
    counts, placement = count_recomputed(schedule), schedule.placement
    stages = [stage for stage, count in enumerate(counts) if count]
    if not stages:
        return "Nothing is recomputed."
    ranks = sorted({placement.ranks[stage] for stage in stages})
    who = f"Rank {ranks[0]} recomputes" if len(ranks) == 1 else f"Ranks {_list(ranks)} recompute"
    runs = [
        (count, [*run])
        for count, run in groupby(range(len(counts)), key=counts.__getitem__)
        if count
    ]
    what = [
        f"{count} of {schedule.num_microbatches}{' forwards' if n == 0 else ''} of "
        + (f"stage {run[0]}" if len(run) == 1 else f"each of stages {_list(run)}")
        for n, (count, run) in enumerate(runs)
    ]
    return f"{who}: {', '.join(what)}."


def describe_order(schedule: Schedule) -> str:
    """Return in a sentence or two in which order the microbatches run.

    >>> describe_order(Schedule.from_csv("0F1,0F0,0B1,0B0\\n"))
    'Microbatches run in the order 1, 0, and their backwards too.'
    """
    forwards, backwards = forward_order(schedule), backward_order(schedule)
    after = (
        "their backwards too"
        if backwards == forwards
        else f"their backwards in the order {', '.join(map(str, backwards))}"
    )
    found = f"Microbatches run in the order {', '.join(map(str, forwards))}, and {after}."
    others = [
        stage
        for stage in range(1, schedule.num_stages)
        if _order_of(schedule, (Forward,), stage) != forwards
        or _order_of(schedule, URGENT_BACKWARD_TYPES, stage) != backwards
    ]
    if not others:
        return found
    named = f"Stage {others[0]} has" if len(others) == 1 else f"Stages {_list(others)} have"
    return f"{found} That is on stage 0. {named} another order, as the schedule says."


def _order_of(
    schedule: Schedule, kinds: tuple[type, ...], stage: int = 0
) -> tuple[MicrobatchId, ...]:
    order = schedule.orders[schedule.placement.ranks[stage]]
    return tuple(
        part.mb
        for action in order
        for part in compute_parts(action)
        if part.stage == stage and isinstance(part, kinds)
    )


def _list(numbers: Sequence[int]) -> str:
    """Return numbers in words, a run of at least three as its ends.

    >>> _list([0, 1]), _list([0, 1, 2]), _list([0, 2, 3])
    ('0 and 1', '0 to 2', '0, 2 and 3')
    """
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last

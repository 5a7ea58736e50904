"""Moves of a walk where forwards may be recomputed: other microbatches, other times, all ranks.

Memory is short there, so a single action can rarely move: its microbatch holds more or less along
its whole way. So some moves take the n-th microbatch of several stages to another time at once.
"""

import random
from math import inf

from penstock.solver.evaluation import fits, peak_memory
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Order, Problem
from penstock.solver.recomputed_orders import drop_to_fit

_MOST_DROPPED = 2  # The most microbatches that a move recomputes in addition.
_FARTHEST = 8  # The farthest that an action of a chain moves, in places.
_SHARE_OF_BACKWARDS = 0.7  # Of chains; the others are of forwards.


def change_drop(
    generator: random.Random, problem: Problem, rank: int, order: Order
) -> Order | None:
    """Move a recomputation anywhere, or remove it; None if that is impossible.

    If there is no room without it, another microbatch is recomputed.
    """
    dropped = [index for index, code in enumerate(order) if problem.recomputes(code)]
    if not dropped:
        return None
    changed = order.copy()
    code = changed.pop(generator.choice(dropped))
    if generator.random() < 0.5:
        changed.insert(generator.randrange(len(order)), code)
        return changed if changed != order and fits(problem, rank, changed) else None
    if fits(problem, rank, changed):
        return changed
    changed_again = drop_some(generator, problem, rank, changed)
    return None if changed_again == order else changed_again


def drop_some(generator: random.Random, problem: Problem, rank: int, order: Order) -> Order | None:
    """Recompute one or two random microbatches, so that there is room for all actions."""
    if peak_memory(problem, order) == inf:
        return None  # An action is before one that it must follow.
    return drop_to_fit(problem, rank, order, generator.choice, most=_MOST_DROPPED)


def shift_chain(
    generator: random.Random, problem: Problem, orders: list[Order]
) -> list[Order] | None:
    """Move the forwards or backwards of a turn on several stages in a row, all one way.

    What does not fit then is recomputed; None if that is not enough.
    """
    first = generator.randrange(problem.num_stages)
    turn = generator.randrange(problem.num_microbatches)
    is_forward = generator.random() >= _SHARE_OF_BACKWARDS
    chain = range(first, problem.num_stages) if is_forward else range(first, -1, -1)
    is_later = generator.random() < 0.5
    changed, touched = orders.copy(), set()
    for stage in chain[: generator.randint(1, len(chain))]:
        rank = problem.placement.ranks[stage]
        distance = generator.randint(1, _FARTHEST)
        changed[rank] = _shift(
            changed[rank], stage, turn, distance, is_forward=is_forward, is_later=is_later
        )
        touched.add(rank)
    for rank in sorted(touched):
        if not fits(problem, rank, changed[rank]):
            fitting = drop_some(generator, problem, rank, changed[rank])
            if fitting is None:
                return None
            changed[rank] = fitting
    return None if changed == orders else changed


def _shift(
    order: Order, stage: int, turn: int, distance: int, *, is_forward: bool, is_later: bool
) -> Order:
    """Move the F, or the I or B, of a stage whose turn it is; W of the stage stay after their I."""
    kinds = (FORWARD,) if is_forward else (INPUT, FULL)
    own = [n for n, code in enumerate(order) if code >> 2 == stage and code & 3 in kinds]
    index = own[turn]
    if not is_later:
        moved = order.copy()
        moved.insert(max(0, index - distance), moved.pop(index))
        return moved
    passed = order[index + 1 : index + 1 + distance]
    stays = [is_forward or code != 4 * stage + WEIGHT for code in passed]
    ahead = [code for code, stay in zip(passed, stays, strict=True) if stay]
    along = [code for code, stay in zip(passed, stays, strict=True) if not stay]
    return [*order[:index], *ahead, order[index], *along, *order[index + 1 + distance :]]

"""Makes orders better, one move at a time: simulated annealing on the critical path.

The critical path is a chain of blocks: actions of one rank without a gap, from the one that waited
for a message to the one that sent the next. To be faster, a block must let its last action come
earlier or its first one later; changes within it change nothing. So moves take an action behind
the last one of its block, or before the first, or bring the last one forward. Where memory is in
the way, a weight backward is brought forward too, which makes room.
"""

import random
import time
from math import exp, inf
from typing import NamedTuple

from penstock.solver.evaluation import critical_blocks, evaluate, fits
from penstock.solver.problem import FULL, INPUT, WEIGHT, Order, Problem

_FARTHEST = 4  # How many places an action goes that is just moved somewhere.


class Walk(NamedTuple):
    """Where a walk led."""

    orders: list[Order]
    """The best on the way."""
    num_evaluated: int
    is_complete: bool
    """Whether it came to its end, or its time was up before."""


def anneal(
    problem: Problem,
    orders: list[Order],
    *,
    num_moves: int,
    heat: float,
    seed: int,
    goal: float = -inf,
    deadline: float = inf,
) -> Walk:
    """The best orders on a random walk of `num_moves` from `orders`; the same for the same seed.

    `heat` is by how much time a move may make it worse, at first; it cools down to none. The walk
    ends early at orders that take no more than `goal`, or at the `deadline` of time.monotonic().
    """
    generator = random.Random(seed)
    current = list(orders)
    timing = evaluate(problem, current)
    best, best_time, cost = list(current), timing.time, timing.cost
    blocks = critical_blocks(timing)
    num_evaluated = 0
    for number in range(num_moves):
        if best_time <= goal:
            break
        if number % 16 == 0 and time.monotonic() > deadline:
            return Walk(best, num_evaluated, is_complete=False)
        rank, first, last = generator.choice(blocks)
        before = current[rank]
        moved = _move(generator, problem, rank, before, first, last)
        if moved is None:
            continue
        current[rank] = moved
        timing = evaluate(problem, current)
        num_evaluated += 1
        warmth = heat * (1 - number / num_moves)
        if timing.cost <= cost or generator.random() < exp((cost - timing.cost) / warmth):
            cost, blocks = timing.cost, critical_blocks(timing)
            if timing.time < best_time * (1 - 1e-12):
                best, best_time = list(current), timing.time
        else:
            current[rank] = before
    return Walk(best, num_evaluated, is_complete=True)


def _move(
    generator: random.Random, problem: Problem, rank: int, order: Order, first: int, last: int
) -> Order | None:
    """The order with one thing changed in a block, or nothing if that is not possible."""
    index = generator.randint(first, last)
    stage, kind = order[index] >> 2, order[index] & 3
    if problem.fuses(stage) and kind in (INPUT, FULL) and generator.random() < 0.3:
        moved = _cut_or_join(order, index)
        return moved if moved is not None and fits(problem, rank, moved) else None
    target = _choose_target(generator, index, first, last)
    if target == last and index == last:
        target = generator.randint(first, last)
    moved = order.copy()
    moved.insert(target, moved.pop(index))
    if moved == order:
        return None
    if not fits(problem, rank, moved):
        _make_room(generator, moved, min(index, target))
        if not fits(problem, rank, moved):
            return None
    return moved


def _choose_target(generator: random.Random, index: int, first: int, last: int) -> int:
    """Where in its order the action at `index` goes: see the top of this file."""
    what = generator.random()
    if what < 0.45:
        return last
    if what < 0.65:
        return first
    distance = 1 if generator.random() < 0.5 else generator.randint(1, _FARTHEST)
    return max(0, index + (distance if generator.random() < 0.6 else -distance))


def _make_room(generator: random.Random, order: Order, start: int) -> None:
    """Brings the next weight backward forward to `start`, or some places behind it."""
    for index in range(start + 1, len(order)):
        if order[index] & 3 == WEIGHT:
            target = generator.randint(start, min(index, start + _FARTHEST - 1))
            order.insert(target, order.pop(index))
            return


def _cut_or_join(order: Order, index: int) -> Order | None:
    """A full backward cut in two, or an input backward and the next weight backward made one."""
    code, changed = order[index], order.copy()
    stage = code >> 2
    if code & 3 == FULL:
        changed[index : index + 1] = [4 * stage + INPUT, 4 * stage + WEIGHT]
        return changed
    weight = 4 * stage + WEIGHT
    if weight not in changed[index:]:
        return None
    changed[index] = 4 * stage + FULL
    del changed[changed.index(weight, index)]
    return changed

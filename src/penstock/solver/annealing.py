"""Improve orders one move at a time: simulated annealing on the critical path.

The critical path is a chain of blocks: actions of one rank without a gap, from the one that waited
for a message to the one that sent the next. To be faster, a block must let its last action come
earlier or its first one later; changes within it change nothing. So a move puts an action after
the last one of its block or before the first, or moves the last one earlier. If there is not
enough memory, a weight backward is also moved earlier to free some, or a microbatch is recomputed
where that is allowed. A recomputation may also be removed: then another microbatch takes its place,
or none.

If microbatches differ, some moves change their sequence instead, or only that of their backwards:
two trade places, or one moves to another place.
"""

import random
import time
from dataclasses import replace
from math import exp, inf
from typing import NamedTuple

from penstock.solver.evaluation import critical_blocks, evaluate, fits, peak_memory
from penstock.solver.problem import FULL, INPUT, WEIGHT, Order, Problem
from penstock.solver.recomputed_orders import drop_to_fit

_FARTHEST = 4  # The farthest that a random move takes an action, in places.
_SHARE_OF_DROPS = 0.15  # Of moves remove recomputations, where forwards may be recomputed.
_MOST_DROPPED = 2  # The most microbatches that a move recomputes in addition.
_SHARE_OF_SEQUENCES = 0.3  # Of moves change the sequence of microbatches, if they differ.
_SHARE_OF_FORWARDS = 0.7  # Of these change it in all actions, not only in backwards.


class Walk(NamedTuple):
    """The result of a random walk from orders to orders."""

    orders: list[Order]
    """The best orders found on the walk."""
    num_evaluated: int
    is_complete: bool
    """True if the walk was not cut short by the deadline."""
    problem: Problem
    """The problem with the sequence of microbatches that the orders are for."""


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
    """Return the best orders of a random walk of `num_moves` from `orders`, repeatable by `seed`.

    `heat` is the scale of the slowdowns that moves may cause at first; it cools down to zero. The
    walk ends early at orders that take no more than `goal`, or when time.monotonic() passes
    `deadline`.
    """
    generator = random.Random(seed)
    current = list(orders)
    timing = evaluate(problem, current)
    best, best_time, cost = Walk(list(current), 0, True, problem), timing.time, timing.cost
    blocks = critical_blocks(timing)
    num_evaluated = 0
    for number in range(num_moves):
        if best_time <= goal:
            break
        if number % 16 == 0 and time.monotonic() > deadline:
            return best._replace(num_evaluated=num_evaluated, is_complete=False)
        rank, first, last = generator.choice(blocks)
        before, before_it = current[rank], problem
        if problem.sequence and generator.random() < _SHARE_OF_SEQUENCES:
            problem = _rearranged(generator, problem)
            if not all(fits(problem, holder, order) for holder, order in enumerate(current)):
                problem = before_it
                continue
        else:
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
                best, best_time = Walk(list(current), 0, True, problem), timing.time
        else:
            current[rank], problem = before, before_it
    return best._replace(num_evaluated=num_evaluated)


def _rearranged(generator: random.Random, problem: Problem) -> Problem:
    """Return the problem with one change in the sequence of microbatches, or of their backwards."""
    places = _places(generator, problem.num_microbatches)
    if problem.may_recompute or generator.random() < _SHARE_OF_FORWARDS:
        return problem.rearranged(places)
    turns = problem.turns or range(problem.num_microbatches)
    return replace(problem, turns=tuple([turns[place] for place in places]))


def _places(generator: random.Random, count: int) -> list[int]:
    """Return the places of a sequence with one change: two trade places, or one moves."""
    places = list(range(count))
    first, second = generator.randrange(count), generator.randrange(count)
    if generator.random() < 0.5:
        places[first], places[second] = places[second], places[first]
    else:
        places.insert(second, places.pop(first))
    return places


def _move(
    generator: random.Random, problem: Problem, rank: int, order: Order, first: int, last: int
) -> Order | None:
    """Return the order with one random change in a block, or None if that change is impossible."""
    index = generator.randint(first, last)
    stage, kind = order[index] >> 2, order[index] & 3
    if problem.may_recompute and generator.random() < _SHARE_OF_DROPS:
        return _remove_drop(generator, problem, rank, order)
    if kind in (INPUT, FULL) and problem.fuses(stage) and generator.random() < 0.3:
        moved = _cut_or_join(order, index)
        return moved if moved is not None and fits(problem, rank, moved) else None
    target = _choose_target(generator, index, first, last)
    if target == last and index == last:
        target = generator.randint(first, last)
    moved = order.copy()
    moved.insert(target, moved.pop(index))
    if moved == order:
        return None
    if fits(problem, rank, moved):
        return moved
    if problem.may_recompute and generator.random() < 0.5:
        return _drop_some(generator, problem, rank, moved)
    _make_room(generator, problem, moved, min(index, target))
    return moved if fits(problem, rank, moved) else None


def _remove_drop(
    generator: random.Random, problem: Problem, rank: int, order: Order
) -> Order | None:
    """Remove a recomputation; recompute another microbatch if there is no room without it."""
    dropped = [index for index, code in enumerate(order) if problem.recomputes(code)]
    if not dropped:
        return None
    changed = order.copy()
    del changed[generator.choice(dropped)]
    if fits(problem, rank, changed):
        return changed
    changed_again = _drop_some(generator, problem, rank, changed)
    return None if changed_again == order else changed_again


def _drop_some(generator: random.Random, problem: Problem, rank: int, order: Order) -> Order | None:
    """Recompute one or two random microbatches, so that there is room for all actions."""
    if peak_memory(problem, order) == inf:
        return None  # An action is before one that it must follow.
    return drop_to_fit(problem, rank, order, generator.choice, most=_MOST_DROPPED)


def _choose_target(generator: random.Random, index: int, first: int, last: int) -> int:
    """Choose the new position of the action at `index`; the module docstring explains the moves."""
    what = generator.random()
    if what < 0.45:
        return last
    if what < 0.65:
        return first
    distance = 1 if generator.random() < 0.5 else generator.randint(1, _FARTHEST)
    return max(0, index + (distance if generator.random() < 0.6 else -distance))


def _make_room(generator: random.Random, problem: Problem, order: Order, start: int) -> None:
    """Move the next weight backward earlier, to `start` or a few places after it."""
    for index in range(start + 1, len(order)):
        if order[index] & 3 == WEIGHT and not problem.recomputes(order[index]):
            target = generator.randint(start, min(index, start + _FARTHEST - 1))
            order.insert(target, order.pop(index))
            return


def _cut_or_join(order: Order, index: int) -> Order | None:
    """Split the full backward at `index`, or join the input backward with the next weight one."""
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

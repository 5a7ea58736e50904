"""Improve orders one move at a time: simulated annealing on the critical path.

The critical path is a chain of blocks: actions of one rank without a gap, from the one that waited
for a message to the one that sent the next. To be faster, a block must let its last action come
earlier or its first one later; changes within it change nothing. So a move puts an action after
the last one of its block or before the first, or moves the last one earlier. If there is not
enough memory, a weight backward is also moved earlier to free some, or a microbatch is recomputed
where that is allowed. A recomputation may also be removed or moved far: see `recomputing_moves`.

If microbatches differ, some moves change their order instead, or that on one stage along with an
action: see `uneven_moves`.
"""

import random
import time
from dataclasses import replace
from math import exp, inf
from typing import NamedTuple

from penstock.passes.held_memory import ROUNDING
from penstock.solver.evaluation import critical_blocks, evaluate, fits, peak_memory
from penstock.solver.named_codes import FULL, INPUT, WEIGHT
from penstock.solver.problem import Order, Problem
from penstock.solver.recomputing_moves import change_drop, drop_some, shift_chain
from penstock.solver.uneven_moves import forwards_in_time, move_with_microbatch, rearrange

_FARTHEST = 4  # The farthest that a random move takes an action, in places.
_SHARE_OF_DROPS = 0.15  # Of moves remove recomputations, where forwards may be recomputed.
# Where forwards may be recomputed, the best orders are far apart, so some moves are larger:
_SHARE_ANYWHERE = 0.2  # of moves that are not on the critical path,
_SHARE_OF_GROUPS = 0.3  # of moves that take several actions along,
_SHARE_OF_CHAINS = 0.2  # and of moves on several ranks.
_SHARE_WITHIN_CAPS = 0.5  # Of moves keep within the caps, if others may exceed them.
_SHARE_OF_SEQUENCES = 0.2  # Of moves change the sequence of microbatches, if they differ.
_SHARE_OF_NAMED = 0.5  # Of other moves take the microbatch of an action along.


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
    leeway: float = 0.0,
) -> Walk:
    """Return the best orders of a random walk of `num_moves` from `orders`, repeatable by `seed`.

    `heat` is the scale of the slowdowns that moves may cause at first; it cools down to zero. The
    walk ends early at orders that take no more than `goal`, or when time.monotonic() passes
    `deadline`. On the way, orders may exceed the caps by the share `leeway`, at a price that rises;
    the best ones do not.
    """
    generator = random.Random(seed)
    current = list(orders)
    timing = evaluate(problem, current)
    best, best_time, cost = Walk(list(current), 0, True, problem), timing.time, timing.cost
    blocks = critical_blocks(timing)
    limits = _Leeway(leeway, problem, timing.time)
    num_evaluated = 0
    for number in range(num_moves):
        if best_time <= goal:
            break
        if number % 16 == 0 and time.monotonic() > deadline:
            return best._replace(num_evaluated=num_evaluated, is_complete=False)
        rank, first, last = generator.choice(blocks)
        if problem.may_recompute and generator.random() < _SHARE_ANYWHERE:
            rank = generator.randrange(problem.num_ranks)
            first = generator.randrange(len(current[rank]))
            last = generator.randrange(first, len(current[rank]))
        before, before_it = current.copy(), problem
        allowed = limits.widen(generator, problem)
        if problem.sequence and generator.random() < _SHARE_OF_SEQUENCES:
            allowed = rearrange(generator, allowed)
            current = [forwards_in_time(allowed, order) for order in current]
            if not all(fits(allowed, holder, order) for holder, order in enumerate(current)):
                current = before
                continue
            problem = replace(allowed, caps=problem.caps)
        elif problem.sequence and generator.random() < _SHARE_OF_NAMED:
            named = _move_named(generator, allowed, rank, current[rank], first, last)
            if named is None:
                continue
            problem, current[rank] = replace(named[0], caps=problem.caps), named[1]
        elif problem.may_recompute and generator.random() < _SHARE_OF_CHAINS:
            shifted = shift_chain(generator, allowed, current)
            if shifted is None:
                continue
            current = shifted
        else:
            moved = _move(generator, allowed, rank, current[rank], first, last)
            if moved is None:
                continue
            current[rank] = moved
        timing = evaluate(problem, current)
        num_evaluated += 1
        progress = number / num_moves
        price = limits.price(problem, current, progress)
        warmth = heat * (1 - progress)
        worse = timing.cost + price - cost
        if worse <= 0 or generator.random() < exp(-worse / warmth):
            cost, blocks = timing.cost + price, critical_blocks(timing)
            if timing.time < best_time * (1 - 1e-12) and price == 0:
                best, best_time = Walk(list(current), 0, True, problem), timing.time
        else:
            current, problem = before, before_it
    return best._replace(num_evaluated=num_evaluated)


class _Leeway:
    """The memory beyond the caps that orders may have on a walk, and its price."""

    def __init__(self, share: float, problem: Problem, typical_time: float) -> None:
        self._share, self._time = share, typical_time
        self._caps = tuple(cap * (1 + share) for cap in problem.caps)

    def widen(self, generator: random.Random, problem: Problem) -> Problem:
        """Return the problem, with larger caps for some of the moves."""
        if self._share == 0 or generator.random() < _SHARE_WITHIN_CAPS:
            return problem
        return replace(problem, caps=self._caps)

    def price(self, problem: Problem, orders: list[Order], progress: float) -> float:
        """Return what to add to the cost of orders that exceed the caps; more as a walk ends."""
        if self._share == 0:
            return 0.0
        peaks = (peak_memory(problem, order) for order in orders)
        pairs = zip(peaks, problem.caps, strict=True)
        # A cap of 0 is not widened.
        excess = sum(max(0.0, peak / (cap * ROUNDING) - 1) for peak, cap in pairs if 0 < cap < inf)
        return excess * self._time * (0.5 + 2 * progress)


def _move_named(
    generator: random.Random, problem: Problem, rank: int, order: Order, first: int, last: int
) -> tuple[Problem, Order] | None:
    """Move an action of a block with its microbatch; None if that is impossible."""
    index = generator.randint(first, last)
    target = _choose_target(generator, index, first, last)
    if target == last and index == last:
        target = generator.randint(first, last)
    target = min(target, len(order) - 1)
    if target == index or problem.recomputes(order[index]):
        return None
    changed, moved = move_with_microbatch(problem, order, index, target)
    if fits(changed, rank, moved):
        return changed, moved
    _make_room(generator, changed, moved, min(index, target))
    return (changed, moved) if fits(changed, rank, moved) else None


def _move(
    generator: random.Random, problem: Problem, rank: int, order: Order, first: int, last: int
) -> Order | None:
    """Return the order with one random change in a block, or None if that change is impossible."""
    index = generator.randint(first, last)
    stage, kind = order[index] >> 2, order[index] & 3
    if problem.may_recompute and generator.random() < _SHARE_OF_DROPS:
        return change_drop(generator, problem, rank, order)
    if kind in (INPUT, FULL) and problem.fuses(stage) and generator.random() < 0.3:
        moved = _cut_or_join(order, index)
        return moved if moved is not None and fits(problem, rank, moved) else None
    target = _choose_target(generator, index, first, last)
    if target == last and index == last:
        target = generator.randint(first, last)
    moved = order.copy()
    takes_more = problem.may_recompute and generator.random() < _SHARE_OF_GROUPS
    end = index + (generator.randint(2, _FARTHEST) if takes_more else 1)
    group = moved[index:end]
    del moved[index:end]
    moved[target:target] = group
    if moved == order:
        return None
    if fits(problem, rank, moved):
        return moved
    if problem.may_recompute and generator.random() < 0.5:
        return drop_some(generator, problem, rank, moved)
    _make_room(generator, problem, moved, min(index, target))
    return moved if fits(problem, rank, moved) else None


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

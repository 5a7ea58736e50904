"""Moves of a walk if microbatches differ: another order of them, on all stages or on one.

An order of codes names no microbatch. So an action that moves past others of its kind on its stage
changes nothing, unless its microbatch moves along.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Order, Problem
from penstock.solver.sequences import change_places

_SHARE_OF_ALL = 0.6  # Of new sequences are for all actions, others only for backwards.


def rearrange(generator: random.Random, problem: Problem) -> Problem:
    """Return the problem with one change in the sequence of all actions, or of all backwards."""
    places = change_places(generator, problem.num_microbatches)
    if generator.random() < _SHARE_OF_ALL:
        return problem.rearranged(places)
    backwards = [tuple([row[place] for place in places]) for row in problem.backward_places]
    return replace(problem, backwards=tuple(backwards))


def move_with_microbatch(
    problem: Problem, order: Order, index: int, target: int
) -> tuple[Problem, Order]:
    """Move an action to another index, and its microbatch among those of its kind on its stage.

    The result may be impossible: an I before its F, or a W with no I before it. A W that comes
    before its own I takes another microbatch that waits.
    """
    moved = order.copy()
    moved.insert(target, moved.pop(index))
    stage, kind = order[index] >> 2, order[index] & 3
    kinds = (INPUT, FULL) if kind in (INPUT, FULL) else (kind,)
    alike = {4 * stage + other for other in kinds}
    own = [number for number, code in enumerate(order) if code in alike]
    passed = sum(index < number <= target or target <= number < index for number in own)
    if not passed:
        return problem, moved
    places = problem.places_of(order)
    row, turn = [places[number] for number in own], own.index(index)
    row.insert(turn + passed if target > index else turn - passed, row.pop(turn))
    return _with_row(problem, stage, kind, row), moved


def _with_row(problem: Problem, stage: int, kind: int, row: Sequence[int]) -> Problem:
    """Return the problem with this order of the actions of a kind on a stage, as places."""

    def changed(rows: Sequence[Sequence[int]], row: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row if number == stage else own) for number, own in enumerate(rows))

    if kind == FORWARD:
        return replace(problem, forwards=changed(problem.forward_places, row))
    if kind == WEIGHT:
        as_inputs = [_turns(problem, places) for places in problem.backward_places]
        return replace(problem, weights=changed(problem.weights or as_inputs, _turns(problem, row)))
    return replace(problem, backwards=changed(problem.backward_places, row))


def _turns(problem: Problem, row: Sequence[int]) -> list[int]:
    """Return by place its index in the row; places that are not in it, last."""
    turns = [problem.num_microbatches] * problem.num_microbatches
    for turn, place in enumerate(row):
        turns[place] = turn
    return turns


def forwards_in_time(problem: Problem, order: Order) -> Order:
    """Return the order with forwards moved earlier, as far as the order of backwards needs it."""
    if problem.may_recompute or not (problem.forwards or problem.backwards):
        return order
    forward_places = problem.forward_places
    done: list[set[int]] = [set() for _ in range(problem.num_stages)]
    moved = [0] * problem.num_stages
    found: Order = []
    for code, place in zip(order, problem.places_of(order), strict=True):
        stage, kind = code >> 2, code & 3
        if kind in (INPUT, FULL):
            while place not in done[stage]:
                done[stage].add(forward_places[stage][len(done[stage])])
                found.append(4 * stage + FORWARD)
                moved[stage] += 1
        elif kind == FORWARD and moved[stage]:
            moved[stage] -= 1
            continue
        elif kind == FORWARD:
            done[stage].add(place)
        found.append(code)
    return found

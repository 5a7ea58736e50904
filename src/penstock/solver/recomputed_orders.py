"""Orders whose forwards may be recomputed: their memory, and what to drop so that it fits.

A microbatch is dropped on a stage if the order has its recomputation, R. Its F then keeps only its
inputs, and from R on it holds what an F that is not dropped leaves.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

from penstock.passes.held_memory import ROUNDING
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Order, Problem, take_waiting


class InFlight(NamedTuple):
    """A microbatch between its forward and its backward on a stage."""

    stage: int
    place: int
    """The place of the microbatch in the sequence."""
    backward: int
    """The position of its backward in the order."""


def peak_with_drops(problem: Problem, order: Order) -> float:
    """Return the most that a rank holds; infinite if an action is before one that it follows."""
    return max(_held_along(problem, order), default=0.0)


def _held_along(problem: Problem, order: Order) -> Iterator[float]:
    """Yield the most that is held during each action; infinite where its place is wrong."""
    num_stages, changes = problem.num_stages, problem.changes
    first, sizes = 4 * num_stages, problem.sizes
    forward_places, backward_places = problem.forward_places, problem.backward_places
    done: list[set[int]] = [set() for _ in range(num_stages)]
    waiting = {code for code in order if code >= first}  # The R that have not run.
    forwards, backwards = [0] * num_stages, [0] * num_stages
    pending: list[list[int]] = [[] for _ in range(num_stages)]  # Those whose W waits.
    held = 0.0
    for code in order:
        stage, kind = code >> 2, code & 3
        if code >= first:
            stage, place = problem.recomputed(code)
            if place not in done[stage]:  # If it is after its backward, that is refused.
                yield inf
            waiting.discard(code)
            rise, net = problem.recomputing[stage]
        elif kind == FORWARD:
            place = forward_places[stage][forwards[stage]]
            is_dropped = first * (place + 1) + 4 * stage + WEIGHT in waiting
            forwards[stage] += 1
            done[stage].add(place)
            rise, net = problem.dropping[stage] if is_dropped else changes[code]
        elif kind == WEIGHT:
            if not pending[stage]:
                yield inf
            weights = problem.weights[stage] if problem.weights else ()
            place = take_waiting(pending[stage], weights) if pending[stage] else 0
            rise, net = changes[code]
        else:
            place = backward_places[stage][backwards[stage]]
            if place not in done[stage] or first * (place + 1) + 4 * stage + WEIGHT in waiting:
                yield inf
            backwards[stage] += 1
            if kind == INPUT:
                pending[stage].append(place)
            rise, net = changes[code]
        size = sizes[place]
        yield held + rise * size
        held += net * size


def drop_all(problem: Problem, order: Order) -> Order:
    """Return the order with R right before each backward."""
    backwards = [0] * problem.num_stages
    found = []
    for code in order:
        if code & 3 in (INPUT, FULL):
            stage = code >> 2
            found.append(
                problem.recomputation(stage, problem.backward_places[stage][backwards[stage]])
            )
            backwards[stage] += 1
        found.append(code)
    return found


def drop_to_fit(
    problem: Problem,
    rank: int,
    order: Order,
    choose: Callable[[list[InFlight]], InFlight] | None = None,
    *,
    most: int | None = None,
) -> Order | None:
    """Return the order with R right before some backwards, so that it fits; None if none does.

    Where the cap is exceeded, `choose` picks what is dropped of the microbatches in flight: if it
    is not given, the one whose backward is last, which helps for longest. At most `most` are
    dropped, if that is given.
    """
    cap = problem.caps[rank] * ROUNDING
    changed = order
    while True:
        held = _held_along(problem, changed)
        excess = next((index for index, most_held in enumerate(held) if most_held > cap), None)
        if excess is None:
            return changed
        candidates = _kept_at(problem, changed, excess)
        if not candidates or most == 0:
            return None
        chosen = choose(candidates) if choose else max(candidates, key=_backward)
        code = problem.recomputation(chosen.stage, chosen.place)
        changed = [*changed[: chosen.backward], code, *changed[chosen.backward :]]
        most = None if most is None else most - 1


def _backward(one: InFlight) -> int:
    return one.backward


def _kept_at(problem: Problem, order: Order, position: int) -> list[InFlight]:
    """Return the microbatches in flight at a position that could be dropped and are not."""
    num_stages = problem.num_stages
    dropped = {code for code in order if problem.recomputes(code)}
    begun: list[set[int]] = [set() for _ in range(num_stages)]
    found = []
    for index, (code, place) in enumerate(zip(order, problem.places_of(order), strict=True)):
        if problem.recomputes(code) or code & 3 == WEIGHT:
            continue
        stage = code >> 2
        if code & 3 == FORWARD:
            if index <= position:
                begun[stage].add(place)
            continue
        is_in_flight = index > position and place in begun[stage]
        is_in_flight &= problem.saves_by_dropping(stage)
        if is_in_flight and problem.recomputation(stage, place) not in dropped:
            found.append(InFlight(stage, place, index))
    return found

"""Sequences of microbatches that differ: the ones to begin a search with."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from math import factorial
from typing import TypeVar

from penstock.ir import Action, Overlap, Schedule
from penstock.ir.action import SingleCompute
from penstock.solver.problem import Problem

_Compute = TypeVar("_Compute", bound=SingleCompute)


def begin_with(problem: Problem) -> list[Problem]:
    """Return the problem with several sequences, the given one first; once if all are alike."""
    if not problem.sequence:
        return [problem]
    found: dict[tuple[int, ...], Problem] = {problem.sequence: problem}
    for places in _sequences(problem):
        arranged = problem.rearranged(places)
        found.setdefault(arranged.sequence, arranged)
    return list(found.values())


def _sequences(problem: Problem) -> Iterator[list[int]]:
    """Yield the shortest first, the longest first, and the longest in the middle or at the ends."""
    step = 4 * problem.num_stages
    work = [
        sum(problem.named.times[mb * step : (mb + 1) * step]) for mb in range(len(problem.sequence))
    ]
    by_work = sorted(range(len(work)), key=lambda place: work[problem.sequence[place]])
    yield by_work
    yield by_work[::-1]
    rising, falling = by_work[::2], by_work[1::2]
    yield [*rising, *falling[::-1]]
    yield [*falling[::-1], *rising]
    yield [*falling, *rising[::-1]]


def more_sequences(problem: Problem, count: int) -> Iterator[Problem]:
    """Yield the problem with all sequences, if there are at most `count`, or with random ones."""
    num_microbatches = len(problem.sequence)
    if not problem.sequence:
        return
    if factorial(num_microbatches) <= count:
        yield from map(problem.rearranged, permutations(range(num_microbatches)))
        return
    generator = random.Random(0)
    for _ in range(count):
        yield problem.rearranged(generator.sample(range(num_microbatches), num_microbatches))


def change_places(generator: random.Random, count: int) -> list[int]:
    """Return the places of a sequence with one change: two trade places, or one moves."""
    places = list(range(count))
    one, other = generator.randrange(count), generator.randrange(count)
    if generator.random() < 0.5:
        places[one], places[other] = places[other], places[one]
    else:
        places.insert(other, places.pop(one))
    return places


def with_sequence(schedule: Schedule, sequence: Sequence[int]) -> Schedule:
    """Return a schedule of computes with its microbatches 0, 1, … replaced by these, if any."""
    if not sequence or list(sequence) == list(range(len(sequence))):
        return schedule

    def rename(action: _Compute) -> _Compute:
        return replace(action, mb=sequence[action.mb])

    def rename_all(action: Action) -> Action:
        if isinstance(action, Overlap):
            return Overlap(rename(action.forward), rename(action.backward))
        assert isinstance(action, SingleCompute)  # Registered schedules have no others.
        return rename(action)

    orders = (map(rename_all, order) for order in schedule.orders)
    return Schedule(orders, schedule.placement, schedule.num_microbatches)

"""The time and memory of orders given as codes, computed much faster than by the simulator."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, TypeAlias

from penstock.passes.held_memory import ROUNDING
from penstock.solver.named_codes import FORWARD, INPUT, WEIGHT
from penstock.solver.problem import Order, Problem
from penstock.solver.recomputed_orders import peak_with_drops

_NOT_SENT = -1.0
_SHARE_OF_OTHERS = 0.02  # Guides the search while the latest rank's time stays the same.

# A position in the orders: rank and index.
Place: TypeAlias = tuple[int, int]


class Evaluation(NamedTuple):
    """The ends of the ranks minus when they start, by the clock; infinite if orders deadlock."""

    lateness: list[float]
    causes: list[list[Place | None]]
    """For each action, the one whose message it waited for; None if it waited only for its rank."""

    @property
    def time(self) -> float:
        """The time of the orders, by the problem's clock."""
        return max(self.lateness)

    @property
    def cost(self) -> float:
        """The measure that a search compares: the time, plus a little for all ranks."""
        return max(self.lateness) + _SHARE_OF_OTHERS * sum(self.lateness)


def evaluate(problem: Problem, orders: Sequence[Order]) -> Evaluation:
    """Run every action as early as its rank and its input allow.

    Messages take `problem.delays`, and none waits for another on its channel.
    """
    num_ranks, num_stages = problem.num_ranks, problem.num_stages
    kinds, stages, durations, _ = problem.named
    delays = problem.delays
    orders = [problem.name_all(order) for order in orders]
    last, nothing_sent = num_stages - 1, [_NOT_SENT] * problem.num_microbatches
    nowhere: list[Place | None] = [None] * problem.num_microbatches
    # By stage and place in the sequence: when what the action waits for arrives, and from where.
    activations = [nothing_sent.copy() for _ in range(num_stages)]
    gradients = [nothing_sent.copy() for _ in range(num_stages)]
    activations_from = [nowhere.copy() for _ in range(num_stages)]
    gradients_from = [nowhere.copy() for _ in range(num_stages)]
    activations[0] = [0.0] * problem.num_microbatches
    own_forwards, own_backwards = problem.forwards, problem.backwards
    forwards, backwards = [0] * num_stages, [0] * num_stages
    causes: list[list[Place | None]] = [[] for _ in range(num_ranks)]
    free = [0.0] * num_ranks
    left = sum(map(len, orders))
    sweep = range(num_ranks)
    while left:
        before = left
        for rank in sweep:
            order, cause, now = orders[rank], causes[rank], free[rank]
            first = len(cause)
            for position in range(first, len(order)):
                code = order[position]
                kind = kinds[code]
                if kind == WEIGHT:
                    cause.append(None)
                    now += durations[code]
                    continue
                stage = stages[code]
                if kind == FORWARD:
                    place = index = forwards[stage]
                    if own_forwards:
                        place = own_forwards[stage][index]
                    arrival, sources = activations[stage][place], activations_from
                else:
                    place = index = backwards[stage]
                    if own_backwards:
                        place = own_backwards[stage][index]
                    arrival, sources = gradients[stage][place], gradients_from
                if arrival < 0:  # It has not been sent.
                    break
                if arrival > now:
                    now = arrival
                    cause.append(sources[stage][place])
                else:
                    cause.append(None)
                now += durations[code]
                if kind == FORWARD:
                    forwards[stage] = index + 1
                    if stage < last:
                        activations[stage + 1][place] = now + delays[stage]
                        activations_from[stage + 1][place] = rank, position
                    else:
                        gradients[stage][place] = now
                        gradients_from[stage][place] = rank, position
                else:
                    backwards[stage] = index + 1
                    if stage:
                        gradients[stage - 1][place] = now + delays[stage - 1]
                        gradients_from[stage - 1][place] = rank, position
            free[rank] = now
            left -= len(cause) - first
        if left == before:
            return Evaluation([inf] * num_ranks, causes)
        sweep = sweep[::-1]  # Activations go one way, gradients the other.
    starts = list(problem.offsets)
    if own_forwards and problem.clock == "span":
        # The first microbatch of a rank need not be the first of all.
        for rank, stages_of_rank in enumerate(problem.stages_of):
            stage = stages_of_rank[0]
            starts[rank] = activations[stage][own_forwards[stage][0]]
    return Evaluation([end - start for end, start in zip(free, starts, strict=True)], causes)


def critical_blocks(timing: Evaluation) -> list[tuple[int, int, int]]:
    """Return the blocks of the critical path, the last first: rank, first and last index.

    Each block runs without a gap. It begins when a message arrives, and ends with the action that
    sends the message which the previous block in the list waited for.
    """
    rank = max(range(len(timing.lateness)), key=timing.lateness.__getitem__)
    last = len(timing.causes[rank]) - 1
    blocks = []
    while True:
        causes, first = timing.causes[rank], last
        while first > 0 and causes[first] is None:
            first -= 1
        blocks.append((rank, first, last))
        cause = causes[first]
        if cause is None:
            return blocks
        rank, last = cause


def fits(problem: Problem, rank: int, order: Order) -> bool:
    """Return whether every I is after its F and every W after its I, within the rank's cap."""
    peak = peak_memory(problem, order)
    return peak < inf and peak <= problem.caps[rank] * ROUNDING


def peak_memory(problem: Problem, order: Order) -> float:
    """Return the most that a rank holds; infinite if an I is before its F or a W before its I."""
    if problem.may_recompute:
        return peak_with_drops(problem, order)
    if problem.sequence:
        places = problem.places_of(order)
        has_exceptions = problem.forwards or problem.backwards
        if has_exceptions and not is_in_time(problem.num_stages, order, places):
            return inf
        order = problem.name_at(order, places)
    kinds, stages, _, changes = problem.named
    in_flight, pending = [0] * problem.num_stages, [0] * problem.num_stages
    held = most = 0.0
    for code in order:
        stage, kind = stages[code], kinds[code]
        if kind == FORWARD:
            in_flight[stage] += 1
        elif kind == WEIGHT:
            pending[stage] -= 1
            if pending[stage] < 0:
                return inf
        else:
            in_flight[stage] -= 1
            if in_flight[stage] < 0:
                return inf
            if kind == INPUT:
                pending[stage] += 1
        rise, net = changes[code]
        if held + rise > most:
            most = held + rise
        held += net
    return most


def is_in_time(num_stages: int, order: Order, places: Sequence[int]) -> bool:
    """Return whether each I or B is after its F, if stages have orders of their own."""
    forwards: list[set[int]] = [set() for _ in range(num_stages)]
    for code, place in zip(order, places, strict=True):
        kind = code & 3
        if kind == FORWARD:
            forwards[code >> 2].add(place)
        elif kind != WEIGHT and place not in forwards[code >> 2]:
            return False
    return True

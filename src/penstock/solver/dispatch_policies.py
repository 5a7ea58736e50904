"""The policies to try: first a grid, then variations of the best."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, inf

from penstock.solver.dispatching import Policy
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Code, Problem

# What a rank prefers: backwards, forwards, or full backwards.
_KINDS = (
    (INPUT, FORWARD, WEIGHT),
    (FORWARD, INPUT, WEIGHT),
    (FULL, FORWARD),
    (FORWARD, FULL),
)
# Microbatches in flight, as a multiple of those that fill the time until one comes back: 1.5 is
# 1F1B if F, I and W take the same time, 3 is ZB-H2, and the last is all that memory holds.
_AHEAD = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 1e9)
_PATIENCE = (1.0, 0.3, 0.6)
_FINE_PATIENCE = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_SHARE_OF_DROPS = 0.35  # Of the variations, where forwards may be recomputed.


# Where forwards may be recomputed: how early an idle rank does so, and with that the share of the
# microbatches in flight that keep their values if there is room.
_REACHES = (1, 0, 2)
_KEEPING = ((1, 1.0), (1, 0.5), (1, 0.0), (0, 1.0))


def grid(problem: Problem) -> Iterator[Policy]:
    """Yield policies with the same rules for all ranks."""
    plain = list(_plain_grid(problem))
    if not problem.may_recompute:
        yield from plain
        return
    for reach, share in _KEEPING:
        for policy in plain:
            keeps = tuple(max(1, round(share * count)) for count in policy.ahead)
            yield replace(policy, keeps=keeps, reach=reach)


def _plain_grid(problem: Problem) -> Iterator[Policy]:
    """Yield policies that say nothing about recomputation."""
    num_ranks = problem.num_ranks
    has_choice = problem.num_stages > num_ranks
    can_fuse = any(map(problem.fuses, range(problem.num_stages)))
    for ahead in _depths(problem):
        for keeps_room in (False, True) if has_choice and min(problem.caps) < inf else (False,):
            for kinds in _KINDS if can_fuse else _KINDS[:2]:
                if problem.better_split and WEIGHT not in kinds:
                    kinds = (*kinds, WEIGHT)  # Where a full backward does not fit.
                # With full backwards, there are no weight backwards to be patient about.
                for patience in _PATIENCE if WEIGHT in kinds else _PATIENCE[:1]:
                    for by_stage in (False, True) if has_choice else (False,):
                        yield Policy(
                            preference=tuple(
                                _prefer(stages, kinds, by_stage=by_stage)
                                for stages in problem.stages_of
                            ),
                            ahead=ahead,
                            patience=(patience,) * num_ranks,
                            keeps_room=keeps_room,
                        )


def _prefer(stages: Sequence[int], kinds: Sequence[int], *, by_stage: bool) -> tuple[Code, ...]:
    """Return the codes by urgency: by kind and then stage, or with `by_stage` the reverse.

    Of two stages, the one nearer to the loss comes first. Weight backwards can wait, so they come
    last, in the order of the stages.
    """
    urgent = [kind for kind in kinds if kind != WEIGHT]
    last_first = stages[::-1]
    if by_stage:
        codes = [4 * stage + kind for stage in last_first for kind in urgent]
    else:
        codes = [4 * stage + kind for kind in urgent for stage in last_first]
    return (*codes, *(4 * stage + WEIGHT for stage in stages if WEIGHT in kinds))


def vary(generator: random.Random, problem: Problem, policy: Policy) -> Policy:
    """Return `policy` with one random change, on one rank or several."""
    if problem.may_recompute and generator.random() < _SHARE_OF_DROPS:
        if generator.random() < 0.2:
            return replace(policy, reach=generator.choice(_REACHES))
        return replace(policy, keeps=_vary_counts(generator, problem, policy.keeps, least=0))
    what = generator.random()
    rank = generator.randrange(problem.num_ranks)
    if what < 0.55:
        return replace(policy, ahead=_vary_counts(generator, problem, policy.ahead, least=1))
    if what < 0.75:
        chosen = generator.choice(_FINE_PATIENCE)
        is_for_all = generator.random() < 0.3
        patience = tuple(
            chosen if is_for_all or number == rank else value
            for number, value in enumerate(policy.patience)
        )
        return replace(policy, patience=patience)
    if what < 0.97:
        changed = list(policy.preference[rank])
        first, second = sorted(generator.sample(range(len(changed)), 2))
        changed.insert(first, changed.pop(second))
        preference = tuple(
            tuple(changed) if number == rank else value
            for number, value in enumerate(policy.preference)
        )
        return replace(policy, preference=preference)
    return replace(policy, keeps_room=not policy.keeps_room)


def _vary_counts(
    generator: random.Random, problem: Problem, counts: tuple[int, ...], *, least: int
) -> tuple[int, ...]:
    """Return the numbers of microbatches of each stage, with those of some stages changed."""
    stage, change = generator.randrange(len(counts)), generator.choice((-2, -1, 1, 2))
    affected = generator.choice(
        [
            range(stage, stage + 1),
            range(stage, stage + 1),
            range(stage + 1),
            range(stage, len(counts)),
        ]
    )
    return tuple(
        min(problem.num_microbatches, max(least, count + change)) if number in affected else count
        for number, count in enumerate(counts)
    )


def _depths(problem: Problem) -> list[tuple[int, ...]]:
    """Return choices of how many microbatches may be in flight on each stage, each choice once."""
    most = problem.num_microbatches
    trips = _round_trips(problem)
    found = [[ceil(factor * trip - 1e-9) for trip in trips] for factor in _AHEAD]
    # As many as memory holds on the first stage, decreasing to the last.
    kept, rank = problem.costs.after_forward[0], problem.placement.ranks[0]
    cap = problem.caps[rank]
    first = most if cap == inf or kept == 0 else min(most, int(cap / kept * (1 + 1e-9)))
    end = max(1, problem.num_stages - 1)
    for last in (1, 2, 4, max(1, first // 2)):
        found.append([round(first + (last - first) * s / end) for s in range(len(trips))])
    return list({tuple(min(most, max(1, depth)) for depth in depths): None for depths in found})


def _round_trips(problem: Problem) -> list[float]:
    """Return by stage how many microbatches the busiest rank could run until one comes back."""
    times = problem.durations
    busiest = max(
        sum(times[4 * stage + kind] for stage in held for kind in (FORWARD, INPUT, WEIGHT))
        for held in problem.stages_of
    )
    trips = [0.0] * problem.num_stages
    beyond = 0.0
    for stage in reversed(range(problem.num_stages)):
        trips[stage] = beyond + times[4 * stage + FORWARD] + times[4 * stage + INPUT]
        if stage > 0:
            beyond = trips[stage] + 2 * problem.delays[stage - 1]
    return [trip / busiest if busiest > 0 else 1.0 for trip in trips]

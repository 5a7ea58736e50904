"""Problems that the tests of the solver share."""

from dataclasses import replace
from math import inf
from random import Random

from penstock import CostTable, Placement
from penstock.solver import Problem


def random_problem(
    seed: int,
    *,
    num_ranks: tuple[int, int] = (2, 4),
    num_microbatches: tuple[int, int] = (2, 6),
    fuses: bool = False,
    leaves_more: bool = False,
    works: bool = False,
    differs: bool = False,
) -> Problem:
    """Uneven stages in whole numbers, messages up to half a forward, and most often a cap.

    The cap is between the smallest that fits and one that never matters. If `fuses`, full
    backwards are quicker than their halves; if `leaves_more`, some I leave more than F did; if
    `works`, actions need memory while they run; if `differs`, microbatches have different sizes.
    """
    random = Random(seed)
    p, m = random.randint(*num_ranks), random.randint(*num_microbatches)
    placement = random.choice(
        [
            Placement.linear(p),
            Placement.linear(p),
            Placement.v(p),
            Placement.loop(p, stages_per_rank=2),
        ]
    )
    stages = range(placement.num_stages)

    def each(low: int, high: int) -> list[int]:
        return [random.randint(low, high) for _ in stages]

    inputs, weights, kept = each(5, 20), each(3, 20), each(4, 12)
    saved = each(0, 4) if fuses else [0 for _ in stages]
    costs = CostTable(
        forward=each(5, 20),
        backward_input=inputs,
        backward_weight=weights,
        backward=[inputs[s] + weights[s] - saved[s] for s in stages],
        after_forward=kept,
        after_input=[random.randint(1, most + 4 * leaves_more) for most in kept],
        delay=[random.randint(0, 6) for _ in stages[1:]],
    )
    clock = random.choice(["makespan", "span"])
    if works:
        names = ("during_forward", "during_input", "during_weight", "during_backward")
        costs = replace(costs, **{name: each(0, 16) for name in names})
    if differs:
        sizes = [random.choice([0.5, 1, 1.5, 2, 3, 4]) for _ in range(m)]
        paces = [[size + random.choice([0, 0, 0.5]) for size in sizes] for _ in stages]
        costs = replace(
            costs,
            time_scale=random.choice([(tuple(sizes),) * len(stages), tuple(map(tuple, paces))]),
            memory_scale=random.choice([(), tuple(sizes)]),
        )
    least = max(Problem.of(costs, placement, m).smallest_caps)
    cap = inf if random.random() < 0.2 else least * random.uniform(1, m)
    return Problem.of(costs, placement, m, memory=cap, clock=clock)

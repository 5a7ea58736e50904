"""Problems in which recomputation is necessary or useful, for the tests of the solver."""

from dataclasses import replace
from random import Random

from problems import random_problem

from penstock.solver import Problem


def recomputing_problem(seed: int, *, works: bool = False, differs: bool = False) -> Problem:
    """Two or three ranks and up to five microbatches, in half of the memory that they would like.

    The cap is between the smallest that fits with recomputation and twice the smallest without.
    If `works`, actions need memory while they run; if `differs`, microbatches have different sizes.
    """
    plain = random_problem(
        seed, num_ranks=(2, 3), num_microbatches=(2, 5), works=works, differs=differs
    )
    random = Random(seed)
    stages = range(plain.num_stages)
    costs = replace(
        plain.costs,
        recompute=[max(1, round(time * random.uniform(0.5, 1))) for time in plain.costs.forward],
        after_dropping=[random.randint(0, round(kept / 2)) for kept in plain.costs.after_forward],
    )
    if works:
        names = ("during_dropping", "during_recompute")
        costs = replace(costs, **{name: [random.randint(0, 12) for _ in stages] for name in names})
    shape = plain.placement, plain.num_microbatches
    least = max(Problem.of(costs, *shape, recompute=True).smallest_caps)
    most = 2 * max(Problem.of(costs, *shape).smallest_caps)
    cap = least if seed % 8 == 0 else random.uniform(least, most)
    return Problem.of(costs, *shape, memory=cap, clock=plain.clock, recompute=True)

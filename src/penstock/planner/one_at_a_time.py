"""The schedule that holds least."""

from penstock.ir import Action, Backward, Forward, Placement, Schedule


def one_at_a_time(placement: Placement, num_microbatches: int) -> Schedule:
    """Every microbatch goes there and back before the next begins: no schedule holds less."""
    stages = range(placement.num_stages)
    orders: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for mb in range(num_microbatches):
        for stage in stages:
            orders[placement.ranks[stage]].append(Forward(stage, mb))
        for stage in reversed(stages):
            orders[placement.ranks[stage]].append(Backward(stage, mb))
    return Schedule(orders, placement, num_microbatches)

"""A slow and obvious way to repeat a block and remove its gaps, unit by unit, with actions."""

from collections.abc import Callable, Sequence

from penstock.ir import Action, BackwardInput, BackwardWeight, Forward
from penstock.schedules import Shape
from penstock.schedules.building_block import PERIOD, Block


def lay_out(shape: Shape, rank: int, block: Block) -> list[Action]:
    """A rank's passes, one microbatch after another; W takes the first free unit after its I."""
    down, up = rank, 2 * shape.p - 1 - rank
    at: dict[int, Action] = {}
    for mb in range(shape.m):
        start = mb * PERIOD
        at[start + block.forward_down] = Forward(down, mb)
        at[start + block.forward_up] = Forward(up, mb)
        at[start + block.input_up] = BackwardInput(up, mb)
        at[start + block.input_down] = BackwardInput(down, mb)
    free = 0
    for unit in sorted(at):
        action = at[unit]
        if isinstance(action, BackwardInput):
            free = max(free, unit + 1)
            while free in at:
                free += 1
            at[free] = BackwardWeight(action.stage, action.mb)
    return [at[unit] for unit in sorted(at)]


class _Rank:
    """One rank while its order is squeezed."""

    def __init__(self, order: Sequence[Action]) -> None:
        self.passes = [action for action in order if not isinstance(action, BackwardWeight)]
        self.weights = [action for action in order if isinstance(action, BackwardWeight)]
        self.due = [
            sum(not isinstance(before, BackwardWeight) for before in order[:place])
            for place, action in enumerate(order)
            if isinstance(action, BackwardWeight)
        ]
        self.last_forward = max(n for n, a in enumerate(self.passes) if isinstance(a, Forward))
        self.done: list[Action] = []

    def next_action(self, is_ready: Callable[[Action], bool]) -> Action | None:
        num_weights = sum(isinstance(action, BackwardWeight) for action in self.done)
        num_inputs = sum(isinstance(action, BackwardInput) for action in self.done)
        num_passes = len(self.done) - num_weights
        has_weight = num_weights < num_inputs
        if has_weight and num_passes <= self.last_forward and self.due[num_weights] <= num_passes:
            return self.weights[num_weights]
        if num_passes < len(self.passes) and is_ready(self.passes[num_passes]):
            return self.passes[num_passes]
        return self.weights[num_weights] if has_weight else None


def squeeze(shape: Shape, orders: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """The orders that result if every pass takes one unit and runs as early as possible."""
    ends: dict[Action, int] = {}
    time = 0

    def is_ready(action: Action) -> bool:
        match action:
            case Forward(stage=stage, mb=mb) if stage > 0:
                return ends.get(Forward(stage - 1, mb), time + 1) <= time
            case BackwardInput(stage=stage, mb=mb) if stage < 2 * shape.p - 1:
                return ends.get(BackwardInput(stage + 1, mb), time + 1) <= time
        return True

    ranks = [_Rank(order) for order in orders]
    while sum(len(rank.done) for rank in ranks) < sum(map(len, orders)):
        chosen = [rank.next_action(is_ready) for rank in ranks]
        assert any(action is not None for action in chosen)
        time += 1
        for rank, action in zip(ranks, chosen, strict=True):
            if action is not None:
                rank.done.append(action)
                ends[action] = time
    return [rank.done for rank in ranks]

"""Schedules in a V from a building block: one microbatch's passes, repeated. arXiv:2405.15362.

[1] Lay out the passes of one microbatch on every rank, in units of one pass.
[2] Repeat that every six units, one microbatch after another; offsets must not collide.
    The two free units in each six are for W, which takes the first one after its I.
[3] Squeeze: run each rank's passes in that order, as early as possible. Where a rank would wait,
    it runs a W that is due later; once it has no forward left, W only fills the waits.

The distance from a pass to its W bounds the memory; squeezing keeps the order, so the bound holds.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.ir import Action, BackwardInput, BackwardWeight, Forward
from penstock.schedules.generator import Orders, Shape, Times

_PERIOD = 6  # F, I and W of two stages.


class Block(NamedTuple):
    """The units in which a rank runs microbatch 0: F of its first and second stage, then I."""

    forward_down: int
    forward_up: int
    input_up: int
    input_down: int


class _Order:
    """The order of one rank while it is squeezed."""

    def __init__(self, order: Iterable[Action]) -> None:
        self.passes: list[Forward | BackwardInput] = []
        self.due: list[int] = []  # The number of passes before the n-th W.
        self.weights: list[BackwardWeight] = []
        for action in order:
            if isinstance(action, BackwardWeight):
                self.weights.append(action)
                self.due.append(len(self.passes))
            elif isinstance(action, Forward | BackwardInput):
                self.passes.append(action)
        self.last_forward = max(n for n, a in enumerate(self.passes) if isinstance(a, Forward))
        self.next_pass = 0
        self.next_weight = 0
        self.num_inputs = 0
        self.done: list[Action] = []

    def is_over(self) -> bool:
        return len(self.done) == len(self.passes) + len(self.weights)

    def next_action(self, is_ready: Callable[[Action], bool]) -> Action | None:
        """Return the action to run now: the next pass, a W that is due or fills a wait, or None."""
        has_weight = self.next_weight < self.num_inputs
        must_keep_up = self.next_pass <= self.last_forward  # Or memory would grow.
        if has_weight and must_keep_up and self.due[self.next_weight] <= self.next_pass:
            return self.weights[self.next_weight]
        if self.next_pass < len(self.passes) and is_ready(self.passes[self.next_pass]):
            return self.passes[self.next_pass]
        return self.weights[self.next_weight] if has_weight else None

    def run(self, action: Action) -> None:
        self.done.append(action)
        if isinstance(action, BackwardWeight):
            self.next_weight += 1
        else:
            self.next_pass += 1
            self.num_inputs += isinstance(action, BackwardInput)


def passes_are_equal(shape: Shape, times: Times) -> bool:
    """Return whether all passes take one unit, and there are enough microbatches for all ranks."""
    return times.f == times.i == times.w and times.c == 0 and shape.m >= shape.p


def repeat_block(shape: Shape, block: Callable[[int], Block]) -> Orders:
    """Do steps [1] to [3] for the blocks that `block` returns for each rank."""
    return squeeze(shape, [_repeat(shape, rank, block(rank)) for rank in range(shape.p)])


def squeeze(shape: Shape, orders: Orders) -> Orders:
    """Do step [3]: return the orders that result if every pass takes one unit."""
    last_stage = 2 * shape.p - 1
    ends: dict[Action, int] = {}
    time = 0

    def is_ready(action: Action) -> bool:
        match action:
            case Forward(stage=stage, mb=mb) if stage > 0:
                return ends.get(Forward(stage - 1, mb), time + 1) <= time
            case BackwardInput(stage=stage, mb=mb) if stage < last_stage:
                return ends.get(BackwardInput(stage + 1, mb), time + 1) <= time
            case _:
                return True

    ranks = [_Order(order) for order in orders]
    while not all(rank.is_over() for rank in ranks):
        chosen = [rank.next_action(is_ready) for rank in ranks]
        assert any(action is not None for action in chosen), "the orders cannot be run"
        time += 1
        for rank, action in zip(ranks, chosen, strict=True):
            if action is not None:
                rank.run(action)
                ends[action] = time
    return [rank.done for rank in ranks]


def _repeat(shape: Shape, rank: int, block: Block) -> list[Action]:
    """Do steps [1] and [2] for one rank."""
    down, up = rank, 2 * shape.p - 1 - rank
    at: dict[int, Action] = {}
    for mb in range(shape.m):
        start = mb * _PERIOD
        at[start + block.forward_down] = Forward(down, mb)
        at[start + block.forward_up] = Forward(up, mb)
        at[start + block.input_up] = BackwardInput(up, mb)
        at[start + block.input_down] = BackwardInput(down, mb)
    assert len(at) == 4 * shape.m, "the passes of two microbatches collide"
    free = 0
    for unit in sorted(at):
        action = at[unit]
        if isinstance(action, BackwardInput):
            free = max(free, unit + 1)
            while free in at:
                free += 1
            at[free] = BackwardWeight(action.stage, action.mb)
    return [at[unit] for unit in sorted(at)]

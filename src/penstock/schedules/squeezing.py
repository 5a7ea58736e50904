"""Remove the gaps from orders in a V: run all ranks' passes, F and I, as early as possible.

Every pass takes one unit of time. Where a rank would wait, it runs a W that is due later; once it
has no forward left, W only fills the waits. The n-th W of a rank is that of its n-th I.

A pass is a number, so that all ranks advance at once: F of microbatch mb on stage s is s * m + mb,
and I is 2pm more.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.ir import Action, BackwardInput, BackwardWeight, Forward, Rank
from penstock.schedules.building_block import PERIOD, Block
from penstock.schedules.generator import Shape

Numbers: TypeAlias = NDArray[np.int32]
Places: TypeAlias = NDArray[np.bool_]


class Layout(NamedTuple):
    """The order of one rank before it is squeezed."""

    passes: Numbers
    due: Numbers
    """The number of passes before each W."""


def layout_of(shape: Shape, order: Iterable[Action]) -> Layout:
    """Return the layout of an order that is written action by action."""
    passes: list[int] = []
    due: list[int] = []
    for action in order:
        if isinstance(action, BackwardWeight):
            due.append(len(passes))
        elif isinstance(action, Forward | BackwardInput):
            is_input = isinstance(action, BackwardInput)
            passes.append((2 * shape.p * is_input + action.stage) * shape.m + action.mb)
    return Layout(np.array(passes, np.int32), np.array(due, np.int32))


def repeat(shape: Shape, rank: Rank, block: Block) -> Layout:
    """Return a block, repeated for every microbatch; W takes the first free unit after its I."""
    p, m, _ = shape
    down, up = rank, 2 * p - 1 - rank
    mbs = np.arange(m, dtype=np.int32)
    stages = np.array([down, up, 2 * p + up, 2 * p + down], np.int32)
    starts = (np.array(block, np.int32)[:, None] + mbs * PERIOD).ravel()
    by_unit = np.argsort(starts)
    units = starts[by_unit]
    passes = (stages[:, None] * m + mbs).ravel()[by_unit]
    assert (np.diff(units) > 0).all(), "the passes of two microbatches collide"
    # At most as many W as there are free units, or as many as I came before: whichever is less.
    last = units[-1] + 1 + 2 * m
    is_free = np.ones(last, np.bool_)
    is_free[units] = False
    has_input = np.zeros(last, np.bool_)
    has_input[units[passes >= 2 * p * m]] = True
    num_free = np.cumsum(is_free, dtype=np.int32)
    num_inputs = np.cumsum(has_input, dtype=np.int32)
    num_weights = num_free + np.minimum(np.minimum.accumulate(num_inputs - num_free), 0)
    unit_of_weight = np.searchsorted(num_weights, np.arange(1, 2 * m + 1))
    return Layout(passes, np.searchsorted(units, unit_of_weight).astype(np.int32))


def squeeze(shape: Shape, lay_out: Callable[[Rank], Layout]) -> Places:
    """Return, for each rank and place in its squeezed order, whether there is a W."""
    p, m, _ = shape
    layouts = [lay_out(rank) for rank in range(p)]
    passes = np.stack([layout.passes for layout in layouts])
    num_passes = passes.shape[1]
    is_input = passes >= 2 * p * m
    last_forward = num_passes - 1 - np.argmax(~is_input[:, ::-1], axis=1)
    # One more column each, for what comes after the last.
    due = np.pad(np.stack([layout.due for layout in layouts]), ((0, 0), (0, 1)))
    needs = np.pad(_needs(shape, passes), ((0, 0), (0, 1)), constant_values=_never(shape))
    ends = np.full(_never(shape) + 1, np.iinfo(np.int32).max, np.int32)
    ends[_always(shape)] = 0
    ranks = np.arange(p)
    next_pass, next_weight, num_inputs = (np.zeros(p, np.int64) for _ in range(3))
    has_weight_at = np.zeros((p, num_passes + 2 * m), np.bool_)
    time = 0
    while (next_pass + next_weight).min() < has_weight_at.shape[1]:
        has_weight = next_weight < num_inputs
        # Or memory would grow.
        is_due = has_weight & (next_pass <= last_forward) & (due[ranks, next_weight] <= next_pass)
        is_ready = ends[needs[ranks, next_pass]] <= time
        runs_weight = is_due | (has_weight & ~is_ready)
        runs_pass = is_ready & ~is_due
        assert (runs_weight | runs_pass).any(), "the orders cannot be run"
        has_weight_at[ranks[runs_weight], (next_pass + next_weight)[runs_weight]] = True
        running, which = ranks[runs_pass], next_pass[runs_pass]
        time += 1
        ends[passes[running, which]] = time
        num_inputs[running] += is_input[running, which]
        next_pass[running] += 1
        next_weight += runs_weight
    return has_weight_at


def squeezed_order(shape: Shape, layout: Layout, has_weight_at: Places) -> list[Action]:
    """Return one rank's order, given its layout and the places of its W."""
    made = [_pass(shape, number) for number in layout.passes.tolist()]
    following = iter(made)
    weights = iter([BackwardWeight(a.stage, a.mb) for a in made if isinstance(a, BackwardInput)])
    return [next(weights if is_weight else following) for is_weight in has_weight_at.tolist()]


def _pass(shape: Shape, number: int) -> Forward | BackwardInput:
    stage, mb = divmod(number, shape.m)
    kind = BackwardInput if stage >= 2 * shape.p else Forward
    return kind(stage % (2 * shape.p), mb)


def _needs(shape: Shape, passes: Numbers) -> NDArray[Any]:
    """Return the pass that each one waits for: that of the stage before or after it."""
    stages = passes // shape.m
    is_forward = stages < 2 * shape.p
    needed = np.where(is_forward, passes - shape.m, passes + shape.m)
    is_free = (stages == 0) | (stages == 4 * shape.p - 1)
    return np.where(is_free, _always(shape), needed)


def _always(shape: Shape) -> int:
    """Return the number that stands for what is done before all passes."""
    return 4 * shape.p * shape.m


def _never(shape: Shape) -> int:
    """Return the number that stands for what is never done."""
    return _always(shape) + 1

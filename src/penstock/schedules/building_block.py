"""Schedules in a V from a building block: one microbatch's passes, repeated. arXiv:2405.15362.

[1] Lay out the passes of one microbatch on every rank, in units of one pass.
[2] Repeat that every six units, one microbatch after another; offsets must not collide.
    The two free units in each six are for W, which takes the first one after its I.
[3] Squeeze: run each rank's passes in that order, as early as possible (`squeezing.py`).

The distance from a pass to its W bounds the memory; squeezing keeps the order, so the bound holds.
Where W goes depends on all ranks: the first order that is asked for takes the time for all.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

from penstock.ir import Action, BackwardWeight, Forward, LazyOrders, Rank
from penstock.ir.action import compute_parts
from penstock.ir.lazy_orders import Order
from penstock.schedules.generator import Shape, Times
from penstock.schedules.squeezing import Layout, squeeze, squeezed_order

PERIOD = 6  # F, I and W of two stages.


class Block(NamedTuple):
    """The units in which a rank runs microbatch 0: F of its first and second stage, then I."""

    forward_down: int
    forward_up: int
    input_up: int
    input_down: int


def passes_are_equal(shape: Shape, times: Times) -> bool:
    """Return whether all passes take one unit, and there are enough microbatches for all ranks."""
    return times.f == times.i == times.w and times.c == 0 and shape.m >= shape.p


def repeat_block(shape: Shape, block: Callable[[Rank], Block]) -> LazyOrders:
    """Do steps [1] to [3] for the blocks that `block` returns for each rank."""

    def stamps(rank: Rank, order: Order) -> Iterator[int]:
        units = block(rank)
        for action in order:
            (part,) = compute_parts(action)
            if isinstance(part, BackwardWeight):
                yield 0  # Nothing waits for it.
            elif isinstance(part, Forward):
                unit = units.forward_down if part.stage == rank else units.forward_up
                yield unit + part.mb * PERIOD
            else:
                unit = units.input_down if part.stage == rank else units.input_up
                yield unit + part.mb * PERIOD

    return squeezed(shape, lambda rank: _repeat(shape, rank, block(rank)), stamps)


def squeezed(
    shape: Shape,
    lay_out: Callable[[Rank], Layout],
    stamps: Callable[[Rank, Order], Iterable[int]],
) -> LazyOrders:
    """Do step [3] for the layouts that `lay_out` returns for each rank."""

    @cache
    def weights() -> list[bytearray]:
        return squeeze(shape, lay_out)

    def make(rank: Rank) -> list[Action]:
        return squeezed_order(shape, lay_out(rank), weights()[rank])

    return LazyOrders(shape.p, make, stamps)


def _repeat(shape: Shape, rank: Rank, block: Block) -> Layout:
    """Do steps [1] and [2] for one rank."""
    p, m, _ = shape
    stages = (rank, 2 * p - 1 - rank, 4 * p - 1 - rank, 2 * p + rank)  # Those of I are 2p more.
    # For each unit of a period: the periods in which it has a pass, and the first of these passes.
    units: list[tuple[int, int, int]] = [(0, 0, 0)] * PERIOD
    for first, stage in zip(block, stages, strict=True):
        period, unit = divmod(first, PERIOD)
        assert units[unit] == (0, 0, 0), "the passes of two microbatches collide"
        units[unit] = period, period + m, stage * m
    passes, due = array("i"), array("i")
    num_waiting = 0
    for period in range(m + max(block) // PERIOD):
        for begin, end, first in units:
            if begin <= period < end:
                passes.append(first + period - begin)
                num_waiting += first >= 2 * p * m
            elif num_waiting:
                due.append(len(passes))
                num_waiting -= 1
    due.extend([len(passes)] * num_waiting)
    return Layout(passes, due)

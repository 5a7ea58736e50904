"""Schedules in a V from a building block: one microbatch's passes, repeated. arXiv:2405.15362.

[1] Lay out the passes of one microbatch on every rank, in units of one pass.
[2] Repeat that every six units, one microbatch after another; offsets must not collide.
    The two free units in each six are for W, which takes the first one after its I.
[3] Squeeze: run each rank's passes in that order, as early as possible (`squeezing.py`).

The distance from a pass to its W bounds the memory; squeezing keeps the order, so the bound holds.
Where W goes depends on all ranks: the first order that is asked for takes the time for all.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from penstock.ir import Action, BackwardWeight, Forward, LazyOrders, Rank
from penstock.ir.action import compute_parts
from penstock.ir.lazy_orders import Order
from penstock.schedules.generator import Shape, Times

if TYPE_CHECKING:
    from penstock.schedules.squeezing import Layout, Places

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

    def lay_out(rank: Rank) -> "Layout":
        from penstock.schedules.squeezing import repeat

        return repeat(shape, rank, block(rank))

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

    return squeezed(shape, lay_out, stamps)


def squeezed(
    shape: Shape,
    lay_out: Callable[[Rank], "Layout"],
    stamps: Callable[[Rank, Order], Iterable[int]],
) -> LazyOrders:
    """Do step [3] for the layouts that `lay_out` returns for each rank."""

    # numpy is loaded when an order is made: it takes a while, and few commands need it.
    @cache
    def weights() -> "Places":
        from penstock.schedules.squeezing import squeeze

        return squeeze(shape, lay_out)

    def make(rank: Rank) -> list[Action]:
        from penstock.schedules.squeezing import squeezed_order

        return squeezed_order(shape, lay_out(rank), weights()[rank])

    return LazyOrders(shape.p, make, stamps)

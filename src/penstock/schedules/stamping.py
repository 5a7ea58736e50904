"""Stamps: numbers that grow along each order, and from the maker of each message to its taker.

With them each rank proves its own part of a schedule free of deadlock (see `LazyOrders`). Most are
the times at which actions would start, in half units, if all took the same time.
"""

from collections.abc import Callable, Iterator

from penstock.ir import BackwardWeight, Forward, Rank
from penstock.ir.action import compute_parts
from penstock.ir.lazy_orders import Order
from penstock.schedules.generator import Shape

_UNUSED = 0  # Nothing waits for a weight backward.


def by_place(*, per_rank: int, per_action: int) -> Callable[[Rank, Order], Iterator[int]]:
    """Return stamps that depend on the rank and the place in its order only."""

    def stamps(rank: Rank, order: Order) -> Iterator[int]:
        return (per_rank * rank + per_action * place for place, _ in enumerate(order))

    return stamps


def in_waves(shape: Shape) -> Callable[[Rank, Order], Iterator[int]]:
    """Return stamps for orders in a loop in which all microbatches pass a stage before the next.

    The ranks take turns, first with forwards, then with backwards. A turn takes m + p: a rank
    starts one later than the one before it, and a microbatch takes one on each.
    """
    p, m, v = shape

    def stamps(rank: Rank, order: Order) -> Iterator[int]:
        for action in order:
            (part,) = compute_parts(action)
            turn = part.stage // p
            if isinstance(part, Forward):
                yield turn * (m + p) + rank + part.mb
            else:
                yield (2 * v - 1 - turn) * (m + p) + p - 1 - rank + part.mb

    return stamps


def in_turn(
    order: Order,
    *,
    first: int,
    ahead: int,
    forward_place: Callable[[int, int], int] = lambda stage, mb: mb,
    backward_place: Callable[[int, int], int] = lambda stage, mb: mb,
) -> Iterator[int]:
    """Yield stamps for an order in which forwards and backwards alternate.

    The first forward is `first`, and the next ones follow by twos; the first backward comes right
    after forward `ahead - 1`. The places are those among all forwards of the rank and among all
    its backwards, given the stage and the microbatch: with one stage per rank, the microbatch.
    """
    for action in order:
        (part,) = compute_parts(action)
        if isinstance(part, Forward):
            yield first + 2 * forward_place(part.stage, part.mb)
        elif isinstance(part, BackwardWeight):
            yield _UNUSED
        else:
            yield first + 2 * (backward_place(part.stage, part.mb) + ahead) - 1

"""Orders that are made one by one, so that a rank of a large schedule makes only what it needs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, overload

from penstock.errors import ScheduleError
from penstock.ir.action import COMPUTE_TYPES, Action, compute_parts
from penstock.ir.message import Rank

Order: TypeAlias = tuple[Action, ...]
"""One rank's actions, in order."""


class LazyOrders(Sequence[Order]):
    """The orders of all ranks; each is made when it is first asked for, and kept.

    `make(rank)` returns the actions of a rank: computes only.

    `stamps(rank, order)` returns a number for each action of that order, such as the time at which
    it would start. They grow along each order and from the maker of each message to its taker, so
    each rank can prove its own part free of deadlock: `verify(rank=...)` checks them. The stamps of
    weight backwards and recomputations do not matter.

    >>> from penstock.ir import Forward
    >>> orders = LazyOrders(256, lambda rank: [Forward(rank, 0)])
    >>> orders[3]
    (Forward(stage=3, mb=0),)
    """

    def __init__(
        self,
        num_ranks: int,
        make: Callable[[Rank], Iterable[Action]],
        stamps: Callable[[Rank, Order], Iterable[int]] | None = None,
    ) -> None:
        self._make = make
        self._stamps = stamps
        self._made: list[Order | None] = [None] * num_ranks

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> Order: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Order, ...]: ...
    def __getitem__(self, index: int | slice) -> Order | tuple[Order, ...]:
        if isinstance(index, slice):
            return tuple(self[rank] for rank in range(len(self))[index])
        rank = range(len(self))[index]
        order = self._made[rank]
        if order is None:
            order = self._made[rank] = _checked(tuple(self._make(rank)), rank)
        return order

    @property
    def has_stamps(self) -> bool:
        return self._stamps is not None

    def stamps_of(self, rank: Rank) -> tuple[int, ...]:
        """Return the stamps of a rank's actions, in order."""
        assert self._stamps is not None, "the orders have no stamps"
        found = tuple(self._stamps(rank, self[rank]))
        if len(found) != len(self[rank]):
            raise ScheduleError(
                f"rank {rank} has {len(self[rank])} actions, but {len(found)} stamps. "
                "Give LazyOrders a function that returns a stamp for each action of the order."
            )
        return found

    def reduced(self, keep: Callable[[Order], Iterable[Action]]) -> "LazyOrders":
        """Return the orders with only what `keep` returns of each: actions, or halves of overlaps.

        They keep their stamps.
        """
        if self._stamps is None:
            return LazyOrders(len(self), lambda rank: keep(self[rank]))

        def stamps(rank: Rank, order: Order) -> Iterator[int]:
            known = {
                part: stamp
                for action, stamp in zip(self[rank], self.stamps_of(rank), strict=True)
                for part in compute_parts(action)
            }
            return (known[compute_parts(action)[0]] for action in order)

        return LazyOrders(len(self), lambda rank: keep(self[rank]), stamps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyOrders | tuple):
            return NotImplemented
        return self is other or (len(self) == len(other) and tuple(self) == tuple(other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type, tuple[tuple[Order, ...]]]:
        """Pickle as a plain tuple: the functions may not be known where it is unpickled."""
        return tuple, (tuple(self),)


def _checked(order: Order, rank: Rank) -> Order:
    for kind in {type(action) for action in order}.difference(COMPUTE_TYPES):
        raise ScheduleError(
            f"the order of rank {rank} holds {kind.__name__}, but it is made when it is asked for, "
            "and may hold computes only. Give the orders of all ranks as "
            "lists to use other actions."
        )
    return order

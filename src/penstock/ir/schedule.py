"""The value that is generated, verified, simulated, drawn and executed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.costs.footprint import Footprint
from penstock.errors import ScheduleError
from penstock.ir.action import (
    BACKWARD_TYPES,
    COMM_TYPES,
    COMPUTE_TYPES,
    SHARDING_TYPES,
    Action,
    Backward,
    BackwardWeight,
    compute_parts,
)
from penstock.ir.csv_text import format_csv, parse_csv
from penstock.ir.lazy_orders import LazyOrders, Order
from penstock.ir.message import MicrobatchId, Rank, Skip, StageId
from penstock.ir.placement import Placement


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """The orders of all ranks, with the placement.

    `str()` draws it, `to_csv()` writes it. The constructor checks little; `verify()` checks all.

    >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")
    >>> schedule
    Schedule(2 ranks, 2 stages, 2 microbatches, 8 actions)
    >>> print(schedule)
    rank 0  0F0 0F1 .   0B0 .   0B1
    rank 1  .   1F0 1B0 1F1 1B1
    """

    orders: Sequence[Order]
    """The order of each rank: a tuple, or LazyOrders, which is equal to that tuple."""
    placement: Placement
    num_microbatches: int
    has_comms: bool = field(init=False, compare=False)
    """True if there are sends, with or without receives."""
    has_sharding: bool = field(init=False, compare=False)
    """True if there are actions that gather or free parameters, or reduce gradients."""
    skips: frozenset[Skip] = field(init=False, compare=False)
    """The pairs of stages, not neighbours, with messages between them; `add_sends` adds them."""

    def __init__(
        self,
        orders: Iterable[Iterable[Action]],
        placement: Placement,
        num_microbatches: int,
    ) -> None:
        if not isinstance(orders, Iterable):
            raise ScheduleError(
                f"orders is {orders!r}. Give an order for each rank; "
                "a function that makes them must yield or return them."
            )
        frozen: Sequence[Order]
        kinds: set[type] = set()
        if isinstance(orders, LazyOrders):
            frozen = orders
        else:
            frozen = tuple(map(_freeze, orders))
            kinds = {type(action) for order in frozen for action in order}
        _check(frozen, placement, num_microbatches, kinds)
        object.__setattr__(self, "orders", frozen)
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "num_microbatches", num_microbatches)
        object.__setattr__(self, "has_comms", not kinds.isdisjoint(COMM_TYPES))
        object.__setattr__(self, "has_sharding", not kinds.isdisjoint(SHARDING_TYPES))
        object.__setattr__(self, "skips", _find_skips(frozen) if self.has_comms else frozenset())

    @classmethod
    def from_csv(cls, text: str) -> "Schedule":
        """Read PyTorch's text format, with or without communication."""
        if not isinstance(text, str):
            raise ScheduleError(
                f"The text is a {type(text).__name__}. "
                "Give the contents of the file: path.read_text()."
            )
        return cls(*parse_csv(text))

    def with_orders(self, orders: Iterable[Iterable[Action]]) -> "Schedule":
        """Return a schedule of the same placement and number of microbatches, in other orders."""
        return Schedule(orders, self.placement, self.num_microbatches)

    def to_csv(self, *, has_waits: bool = False) -> str:
        """Return PyTorch's text format; if the schedule verifies, `from_csv` gives an equal one.

        With `has_waits`, there is a cell that waits for each send and each reduction, without which
        torch 2.15 does not load them; older versions do not know these cells.
        """
        return format_csv(self.orders, has_waits=has_waits)

    def verify(
        self,
        *,
        rank: Rank | None = None,
        costs: Footprint | None = None,
        memory: float | Iterable[float] | None = None,
    ) -> None:
        """Raise a ScheduleError if the schedule cannot run; see `penstock.passes.verify`."""
        from penstock.passes.verification import verify

        verify(self, rank=rank, costs=costs, memory=memory)

    @property
    def has_backward(self) -> bool:
        """True if the schedule trains; False if it is for inference only."""
        # Ranks that do not agree are refused, so one of them is enough.
        orders = self.orders[:1] if isinstance(self.orders, LazyOrders) else self.orders
        return any(
            isinstance(part, BACKWARD_TYPES)
            for order in orders
            for action in order
            for part in compute_parts(action)
        )

    @property
    def adds_in_order(self) -> bool:
        """True if every stage adds up its weight gradients in the order of microbatches.

        All such schedules give a model the same gradients, bit for bit, with full or split
        backwards, unless it draws random numbers; docs/design.md has one more exception.
        """
        return all(
            mbs == sorted(mbs)
            for order in self.orders
            for mbs in _added_microbatches(order).values()
        )

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.orders))

    @property
    def counts(self) -> tuple[str, str, str, str]:
        """The numbers of ranks, stages, microbatches and actions, in words."""
        return (
            _count(self.num_ranks, "rank"),
            _count(self.num_stages, "stage"),
            _count(self.num_microbatches, "microbatch"),
            _count(self.num_actions, "action"),
        )

    def __repr__(self) -> str:
        return f"Schedule({', '.join(self.counts)})"

    def __str__(self) -> str:
        from penstock.ir.grid import format_grid  # It imports this module.

        return format_grid(self)


def _freeze(order: Iterable[Action]) -> Order:
    if not isinstance(order, Iterable):
        raise ScheduleError(
            f"The orders hold {order}, which is not an order. Give a list of actions for each rank."
        )
    return tuple(order)


def _find_skips(orders: Sequence[Order]) -> frozenset[Skip]:
    skips = (
        action.message.skip
        for order in orders
        for action in order
        if isinstance(action, COMM_TYPES)
    )
    return frozenset(skip for skip in skips if skip is not None)


def _added_microbatches(order: Order) -> dict[StageId, list[MicrobatchId]]:
    """Return, by stage, the microbatches whose weight gradients a rank adds, in order."""
    added: dict[StageId, list[MicrobatchId]] = {}
    for action in order:
        for part in compute_parts(action):
            if isinstance(part, Backward | BackwardWeight):
                added.setdefault(part.stage, []).append(part.mb)
    return added


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _check(
    orders: Sequence[Order],
    placement: Placement,
    num_microbatches: int,
    kinds: set[type],
) -> None:
    if not isinstance(placement, Placement):
        raise ScheduleError(
            f"placement is {placement!r}. Expected a Placement, such as Placement([0, 1])."
        )
    if len(orders) != placement.num_ranks:
        raise ScheduleError(
            f"There are {len(orders)} orders, but the placement has {placement.num_ranks} ranks. "
            "Give one order for each rank."
        )
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ScheduleError(
            f"num_microbatches is {num_microbatches!r}. Expected a whole number, at least 1."
        )
    if strange := kinds.difference(COMPUTE_TYPES, COMM_TYPES, SHARDING_TYPES):
        names = ", ".join(sorted(kind.__name__ for kind in strange))
        raise ScheduleError(
            f"An order holds {names}, which is not an action. "
            "Use the types of penstock.ir, such as Forward(0, 1)."
        )

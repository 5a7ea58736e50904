"""The type that describes an algorithm, and the checks that all algorithms share.

Legend, here and in every file of this folder: p ranks, m microbatches, v stages per rank;
f, i, w are the times of F, I and W of one rank's whole share, c is the delay of a message.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from penstock.errors import ScheduleError
from penstock.ir import Action, Placement, Schedule


class Shape(NamedTuple):
    """The numbers of ranks, microbatches, and stages per rank."""

    p: int
    m: int
    v: int


class Times(NamedTuple):
    """The times of a rank's whole share, and the delay of a message."""

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0
    c: float = 0.0

    @property
    def total(self) -> float:
        return self.f + self.i + self.w


Orders: TypeAlias = Iterable[Iterable[Action]]
"""The actions of each rank, in order, as an algorithm makes them."""
Clock: TypeAlias = Literal["makespan", "span"]


def linear(shape: Shape) -> Placement:
    """Return the placement with one stage per rank."""
    return Placement.linear(shape.p)


def loop(shape: Shape) -> Placement:
    """Return the placement that goes through all ranks v times."""
    return Placement.loop(shape.p, stages_per_rank=shape.v)


def v_shape(shape: Shape) -> Placement:
    """Return the placement with two stages per rank, in a V."""
    return Placement.v(shape.p)


class Bubble(NamedTuple):
    """The idle time of a rank, as far as it is known, if all stages cost the same."""

    time: Callable[[Shape, Times], float]
    clock: Clock
    holds: Callable[[Shape, Times], bool] = lambda shape, times: True
    """The condition on shapes and times under which `time` is exact."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Generator:
    """An algorithm that makes schedules: call it with the numbers of ranks and microbatches.

    >>> from penstock import schedules
    >>> schedules.get("1F1B")(num_ranks=4, num_microbatches=8)
    Schedule(4 ranks, 4 stages, 8 microbatches, 64 actions)
    """

    name: str
    aliases: tuple[str, ...] = ()
    source: str = ""
    """The paper or program that the algorithm is from."""
    orders: Callable[[Shape], Orders]
    placement: Callable[[Shape], Placement] = linear
    stages_per_rank: int = 1
    """The number of stages that each rank holds, unless the caller may choose another."""
    takes_any_stages_per_rank: bool = False
    min_microbatches: Callable[[Shape], int] = lambda shape: 1
    bubble: Bubble | None = None
    peak: Callable[[Shape], float] | None = None
    """The most microbatches whose activations a rank holds, counting a whole rank's share as 1."""

    def __call__(
        self, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
    ) -> Schedule:
        """Return the schedule; `stages_per_rank` defaults to the algorithm's own number."""
        v = self.stages_per_rank if stages_per_rank is None else stages_per_rank
        shape = Shape(num_ranks, num_microbatches, v)
        self._check(shape)
        placement = self.placement(shape)
        if placement.num_stages != num_ranks * v:
            raise ScheduleError(
                f"stages_per_rank is {v}, but the placement of {self.name} has "
                f"{placement.num_stages} stages on {num_ranks} ranks. "
                "Give the Generator a placement that fits, such as schedules.loop."
            )
        return Schedule(self.orders(shape), placement, num_microbatches)

    def __repr__(self) -> str:
        return f"<schedule generator {self.name}>"

    def _check(self, shape: Shape) -> None:
        names = ("num_ranks", "num_microbatches", "stages_per_rank")
        for name, value in zip(names, shape, strict=True):
            if not isinstance(value, int):
                raise ScheduleError(f"{name} is {value!r}. Expected a whole number.")
        if shape.p < 1:
            raise ScheduleError(f"num_ranks is {shape.p}. {self.name} needs at least 1.")
        if self.takes_any_stages_per_rank:
            if shape.v < 1:
                raise ScheduleError(f"stages_per_rank is {shape.v}. {self.name} needs at least 1.")
        elif shape.v != self.stages_per_rank:
            raise ScheduleError(
                f"stages_per_rank is {shape.v}. {self.name} needs {self.stages_per_rank}. "
                "Leave it out, or use a schedule that takes any number, such as Interleaved1F1B."
            )
        fewest = self.min_microbatches(shape)
        if shape.m < fewest:
            raise ScheduleError(
                f"num_microbatches is {shape.m}. {self.name} needs at least {fewest} where "
                f"num_ranks is {shape.p}. Cut the batch into more microbatches, or use fewer ranks."
            )

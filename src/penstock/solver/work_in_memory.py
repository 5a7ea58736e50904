"""The work that a rank must have done, or can have done, by what it may hold at a moment.

A microbatch goes through states on a rank: F on its stages, from the first to the last, then I on
them, from the last to the first, and each W after its I. In each state it holds some memory, and
has taken some time. Microbatches are alike, so together they can only be at points between those of
single states. So a convex hull of these points limits how much memory some work frees at most, and
how much work some memory allows at most.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple


class StageWork(NamedTuple):
    """The least times of the actions of a stage, and what a microbatch holds of it."""

    forward: float
    input: float
    weight: float
    after_forward: float
    after_input: float

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight


class State(NamedTuple):
    """What a microbatch has done on a rank."""

    num_forwards: int
    num_inputs: int
    held: float
    time: float


def states(stages: Sequence[StageWork]) -> Iterator[State]:
    """Yield the states of a microbatch on a rank; `stages` are those of the rank, in order.

    Of those that differ only in which W were run, others are between these: the W that free most
    in their time are run first.
    """
    held = time = 0.0
    yield State(0, 0, 0.0, 0.0)
    for count, stage in enumerate(stages, 1):
        held += stage.after_forward
        time += stage.forward
        yield State(count, 0, held, time)
    pending: list[StageWork] = []
    for count, stage in enumerate(reversed(stages), 1):
        held += stage.after_input - stage.after_forward
        time += stage.input
        pending.append(stage)
        yield State(len(stages), count, held, time)
        freed = spent = 0.0
        for one in sorted(pending, key=_freed_per_time, reverse=True):
            freed += one.after_input
            spent += one.weight
            yield State(len(stages), count, held - freed, time + spent)


def _freed_per_time(stage: StageWork) -> float:
    return stage.after_input / stage.weight if stage.weight > 0 else inf


class RankWork:
    """Limits on what a rank has done when an F or an I starts; see the module.

    `stages` are those of the rank, in order, and `index` is that of a stage among them. `cap` is
    what the rank may hold.
    """

    def __init__(self, stages: Sequence[StageWork], num_microbatches: int, cap: float) -> None:
        self._stages, self._cap, self._num_microbatches = stages, cap, num_microbatches
        self.total = num_microbatches * sum(stage.total for stage in stages)
        known = list(states(stages))
        self._held = [known[count].held for count in range(1, len(stages) + 1)]
        self._time = [known[count].time for count in range(1, len(stages) + 1)]
        self._to_free = [
            Hull(
                (self._held[index] - state.held, state.time - self._time[index])
                for state in known
                if state.num_forwards > index
            )
            for index in range(len(stages))
        ]
        self._in_memory = [
            Hull(
                (-state.held, -state.time)
                for state in known
                if state.num_inputs < len(stages) - index
            )
            for index in range(len(stages))
        ]

    def least_freeing(self, index: int, mb: int, extra: float = 0.0) -> float:
        """Return the least time of what must be over to free memory for F of `mb`.

        F on this stage and on earlier ones is not counted. With these alone, the rank would hold
        `mb` + 1 microbatches, and `extra`, which F needs while it runs beyond what it leaves. Those
        before `mb` must have freed what exceeds the cap.
        """
        excess = (mb + 1) * self._held[index] + extra - self._cap
        return mb * self._to_free[index].at(excess / mb) if mb and excess > 0 else 0.0

    def most_before(self, index: int, mb: int, extra: float = 0.0) -> float:
        """Return the most time of what can be over when I of `mb` starts.

        All of the microbatches before `mb` can be over. `mb` itself holds what F has left on this
        stage and on earlier ones, and I needs `extra` while it runs. The rest of the memory is for
        those after `mb`, which have not begun I on this stage.
        """
        over = mb * sum(stage.total for stage in self._stages) + self._time[-1]
        over += sum(stage.input + stage.weight for stage in self._stages[index + 1 :])
        others = self._num_microbatches - mb - 1
        if others:
            room = max(0.0, self._cap - extra - self._held[index])
            over -= others * self._in_memory[index].at(-room / others)
        return over


class Hull:
    """The lower convex hull of points: the least y for x or more, as a mixture of points."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        corners: list[tuple[float, float]] = []
        for x, y in sorted(points, key=lambda point: (-point[0], point[1])):
            if corners and y >= corners[-1][1]:
                continue  # A point with a larger x is as low.
            while len(corners) > 1 and _is_above(corners[-1], corners[-2], (x, y)):
                corners.pop()
            corners.append((x, y))
        self._x, self._y = zip(*reversed(corners), strict=True)

    def at(self, x: float) -> float:
        """Return the height of the hull; beyond the last point, that of the last point."""
        after = bisect_right(self._x, x)
        if after == 0:
            return float(self._y[0])
        if after == len(self._x):
            return float(self._y[-1])
        left, right = self._x[after - 1], self._x[after]
        share = (x - left) / (right - left)
        return float(self._y[after - 1] * (1 - share) + self._y[after] * share)


def _is_above(
    point: tuple[float, float], right: tuple[float, float], left: tuple[float, float]
) -> bool:
    """Return whether `point` is on or above the line between the others."""
    slope = (right[1] - left[1]) / (right[0] - left[0])
    return point[1] >= left[1] + slope * (point[0] - left[0])

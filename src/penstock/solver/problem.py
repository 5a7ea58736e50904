"""The problem that the solver solves, and its orders, as plain numbers.

Microbatches are alike, so it does not matter which of them an action works on. Give the first
forward on a stage to microbatch 0, the second to 1, and the same for its I and its W. The first n
microbatches that reach a stage are then those that the previous stage finished first, so nothing
waits longer than before. Memory depends only on counts. So some best schedule has the microbatches
in order on every stage, in F, in I and in W, and only such schedules are searched here.

An order then does not need to name microbatches: it is a list of codes, 4 * stage + kind.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Final, TypeAlias, get_args

from penstock.costs import CostTable
from penstock.errors import CostError, ScheduleError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Placement,
    Schedule,
)
from penstock.ir.action import compute_parts
from penstock.passes.held_memory import ROUNDING, Change, cap_of_each_rank, stage_changes
from penstock.schedules.generator import Clock
from penstock.timeline import Report

FORWARD, INPUT, WEIGHT, FULL = range(4)
KINDS: Final = (Forward, BackwardInput, BackwardWeight, Backward)
_KIND_OF: Final = {kind: number for number, kind in enumerate(KINDS)}

Code: TypeAlias = int
Order: TypeAlias = list[Code]
"""A rank's actions as codes; F, I, W and B of a stage are each in the order of microbatches."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The costs, placement, number of microbatches and caps that a schedule is searched for."""

    costs: CostTable
    placement: Placement
    num_microbatches: int
    caps: tuple[float, ...]
    """The most that each rank may hold; infinite if it is not limited."""
    clock: Clock
    stages_of: tuple[tuple[int, ...], ...]
    durations: tuple[float, ...]
    """By code."""
    changes: tuple[Change, ...]
    """By code: what an action does to the memory of its rank."""
    delays: tuple[float, ...]
    """The least time of a message on each edge; zero between stages of one rank."""
    offsets: tuple[float, ...]
    """The time subtracted from each rank's end: when it can first start, by span; 0, by makespan.

    Both clocks measure the largest end minus offset: a rank's first action is the forward of
    microbatch 0, which starts as early as possible.
    """

    @classmethod
    def of(
        cls,
        costs: CostTable,
        placement: Placement,
        num_microbatches: int,
        *,
        memory: float | Iterable[float] | None = None,
        clock: Clock = "makespan",
    ) -> "Problem":
        """Check the arguments and return the problem that they describe."""
        _check(costs, placement, num_microbatches, clock)
        num_ranks = placement.num_ranks
        caps = cap_of_each_rank("memory", inf if memory is None else memory, num_ranks)
        ranks = placement.ranks
        delays = tuple(
            0.0 if ranks[edge] == ranks[edge + 1] else delay + transfer
            for edge, (delay, transfer) in enumerate(zip(costs.delay, costs.transfer, strict=True))
        )
        steps = (f + d for f, d in zip(costs.forward, (*delays, 0.0), strict=True))
        starts = (0.0, *accumulate(steps))
        stages_of = tuple(placement.stages_of(rank) for rank in range(num_ranks))
        rows = (costs.forward, costs.backward_input, costs.backward_weight, costs.backward)
        by_stage = (stage_changes(costs, stage) for stage in range(placement.num_stages))
        return cls(
            costs=costs,
            placement=placement,
            num_microbatches=num_microbatches,
            caps=caps,
            clock=clock,
            stages_of=stages_of,
            durations=tuple(time for stage in zip(*rows, strict=True) for time in stage),
            changes=tuple(changes[kind] for changes in by_stage for kind in KINDS),
            delays=delays,
            offsets=tuple(starts[stages[0]] if clock == "span" else 0.0 for stages in stages_of),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.caps)

    @property
    def memory(self) -> tuple[float, ...] | None:
        """The caps, or None if no rank is limited."""
        return None if min(self.caps) == inf else self.caps

    @property
    def num_stages(self) -> int:
        return len(self.placement.ranks)

    @property
    def smallest_caps(self) -> tuple[float, ...]:
        """The smallest cap of each rank with which its microbatches fit one after the other."""
        return tuple(float(self.needs_from(rank)[0]) for rank in range(self.num_ranks))

    def needs_from(self, rank: int) -> list[float]:
        """Return what one microbatch still needs on `rank` after its first n forwards there.

        That is the most that it adds at any moment to what the rank holds then, with no other
        action in between. `n` counts from 0 to the number of stages.
        """
        needed = self.needs_of_backwards(rank)[-1]
        found = [needed]
        for stage in reversed(self.stages_of[rank]):
            forward = self.changes[4 * stage + FORWARD]
            needed = max(forward.rise, forward.net + needed)
            found.append(needed)
        return found[::-1]

    def needs_of_backwards(self, rank: int) -> list[float]:
        """Return what the backwards of a microbatch on `rank` need, from each stage to the first.

        They run in a row, from that stage on; see `needs_from`.
        """
        needed, found = 0.0, []
        for stage in self.stages_of[rank]:
            freed = self.changes[4 * stage + FORWARD].net
            needed = max(self.least_rise(stage), needed - freed)
            found.append(needed)
        return found

    def least_rise(self, stage: int) -> float:
        """Return what a backward of `stage` needs at least: a full one, or its halves in a row."""
        return min(self.changes[4 * stage + FULL].rise, self._rise_of_halves(stage))

    @property
    def better_split(self) -> tuple[int, ...]:
        """The stages on which the halves of a backward in a row need less than a full one."""
        full = self.changes[FULL::4]
        return tuple(s for s, change in enumerate(full) if self._rise_of_halves(s) < change.rise)

    def _rise_of_halves(self, stage: int) -> float:
        first, second = self.changes[4 * stage + INPUT], self.changes[4 * stage + WEIGHT]
        return max(first.rise, first.net + second.rise)

    def find_shortage(self) -> int | None:
        """Return the first rank on which nothing fits, if there is one."""
        pairs = zip(self.smallest_caps, self.caps, strict=True)
        short = (rank for rank, (least, cap) in enumerate(pairs) if least > cap * ROUNDING)
        return next(short, None)

    def find_excess(self, report: Report) -> int | None:
        """Return the first rank that exceeds its cap in a simulated schedule, if there is one."""
        pairs = zip(report.ranks, self.caps, strict=True)
        over = (n for n, (rank, cap) in enumerate(pairs) if rank.peak_memory > cap * ROUNDING)
        return next(over, None)

    def time_of(self, report: Report) -> float:
        """Return the time of a simulated schedule, by the clock."""
        return report.makespan if self.clock == "makespan" else report.span

    def fuses(self, stage: int) -> bool:
        """Return whether a full backward of `stage` can take less time or memory than halves."""
        times, code = self.durations, 4 * stage
        halves = times[code + INPUT] + times[code + WEIGHT]
        is_quicker = times[code + FULL] < halves * (1 - 1e-12)
        return is_quicker or self.saves_memory(stage)

    def saves_memory(self, stage: int) -> bool:
        """Return whether a full backward of `stage` can take less memory than its halves."""
        is_larger = self.changes[4 * stage + INPUT].net > 0
        return is_larger or self.changes[4 * stage + FULL].rise < self._rise_of_halves(stage)

    @property
    def has_queues(self) -> bool:
        """True if messages may wait for each other, which only the simulator models."""
        is_linear = self.num_stages == self.num_ranks
        return any(self.costs.transfer) or (not is_linear and len(set(self.costs.delay)) > 1)

    def schedule(self, orders: Sequence[Order]) -> Schedule:
        """Return the orders as a schedule."""
        return Schedule(map(self._actions, orders), self.placement, self.num_microbatches)

    def _actions(self, order: Order) -> Iterator[Action]:
        forwards, backwards = [0] * self.num_stages, [0] * self.num_stages
        pending: list[deque[int]] = [deque() for _ in range(self.num_stages)]
        for code in order:
            stage, kind = code >> 2, code & 3
            if kind == FORWARD:
                mb = forwards[stage]
                forwards[stage] += 1
            elif kind == WEIGHT:
                mb = pending[stage].popleft()
            else:
                mb = backwards[stage]
                backwards[stage] += 1
                if kind == INPUT:
                    pending[stage].append(mb)
            yield KINDS[kind](stage, mb)


def codes(schedule: Schedule) -> list[Order]:
    """Return the orders of a schedule as codes; the parts of an overlap follow one another.

    It must not recompute anything.
    """
    return [
        [
            4 * part.stage + _KIND_OF[type(part)]
            for action in order
            for part in compute_parts(action)
        ]
        for order in schedule.orders
    ]


def nothing_fits(problems: Sequence[Problem]) -> ScheduleError:
    """Return the error for caps that are too small, with the smallest memory that would fit."""
    problem = min(problems, key=lambda problem: max(problem.smallest_caps))
    rank = problem.find_shortage()
    assert rank is not None
    cap, needed = in_full(problem.caps[rank]), in_full(problem.smallest_caps[rank])
    return ScheduleError(
        f"Nothing fits: rank {rank} may hold {cap}, but one microbatch on its stages "
        f"{list(problem.stages_of[rank])} needs {needed}. The smallest "
        f"memory that fits is {in_full(max(problem.smallest_caps))} on each rank: allow that, use "
        "smaller microbatches, or cut the model into more stages."
    )


def in_full(value: float) -> str:
    """Format `value` with all digits, so that a user who enters it has enough memory."""
    return f"{value:.0f}" if value.is_integer() else repr(value)


def check_costs(costs: CostTable) -> None:
    if not isinstance(costs, CostTable):
        raise CostError(f"costs is {costs!r}. Expected a penstock.CostTable.")


def _refuse_scales(costs: CostTable) -> None:
    if costs.num_microbatches is not None:
        raise CostError(
            f"The costs have scales for {costs.num_microbatches} microbatches. Only simulations "
            "know these so far: give costs without scales."
        )


def _check(costs: CostTable, placement: Placement, num_microbatches: int, clock: Clock) -> None:
    check_costs(costs)
    if not isinstance(placement, Placement):
        raise ScheduleError(
            f"placement is {placement!r}. Expected a Placement, such as Placement.v(2)."
        )
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ScheduleError(
            f"num_microbatches is {num_microbatches!r}. Expected a whole number, at least 1."
        )
    if placement.num_stages != costs.num_stages:
        raise CostError(
            f"The costs are for {costs.num_stages} stages, but the placement has "
            f"{placement.num_stages}. Give costs for each stage."
        )
    _refuse_scales(costs)
    if clock not in get_args(Clock):
        raise ScheduleError(f"clock is {clock!r}. Expected 'makespan' or 'span'.")
    # Otherwise a schedule could delay a rank's start, and the rank's offset would not be known.
    num_ranks = placement.num_ranks
    first_stages = [placement.stages_of(rank)[0] for rank in range(num_ranks)]
    if clock == "span" and max(first_stages) >= num_ranks:
        raise ScheduleError(
            f"clock is 'span', but rank {first_stages.index(max(first_stages))} has its first "
            f"stage, {max(first_stages)}, after another rank's second. Expected a placement in "
            f"which every rank has one of the first {num_ranks} stages: linear, a loop or a V. "
            "Or use 'makespan'."
        )

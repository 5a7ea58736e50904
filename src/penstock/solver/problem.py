"""The problem that the solver solves, and its orders, as plain numbers.

If microbatches are alike, it does not matter which of them an action works on. Give the first
forward on a stage to microbatch 0, the second to 1, and the same for its I and its W. The first n
microbatches that reach a stage are then those that the previous stage finished first, so nothing
waits longer than before. Memory depends only on counts. So some best schedule has the microbatches
in order on every stage, in F, in I and in W, and only such schedules are searched here.

An order then does not need to name microbatches: it is a list of codes, 4 * stage + kind.

If microbatches differ, the problem says in which sequence they run, and on which stages F, I or W
have another order. The search chooses these too: first one sequence for all, then exceptions.

If forwards may be recomputed, the order of microbatches on a stage can matter too: of two of them,
only one may have dropped its values. If they are alike, only schedules with them in order are
searched all the same.

A recomputation names its microbatch, by its place in the sequence. Like a weight backward, it waits
for no message, so it has the code of one on a stage that does not exist:
(place + 1) * num_stages + stage.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from statistics import fmean
from typing import Any, Final, TypeAlias

from penstock.costs import CostTable
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Placement,
    Recompute,
    Schedule,
)
from penstock.ir.action import compute_parts
from penstock.passes.held_memory import (
    ROUNDING,
    Change,
    cap_of_each_rank,
    dropping_change,
    stage_changes,
)
from penstock.schedules.generator import Clock
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT, Named
from penstock.solver.problem_checks import check_problem
from penstock.timeline import Report

KINDS: Final = (Forward, BackwardInput, BackwardWeight, Backward)
_KIND_OF: Final = {kind: number for number, kind in enumerate(KINDS)}


Code: TypeAlias = int
Order: TypeAlias = list[Code]
"""A rank's actions as codes; the problem gives the order of microbatches of each kind and stage."""


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
    """By code: the time of an action; its mean, if microbatches differ."""
    named: Named
    changes: tuple[Change, ...]
    """By code: what an action does to the memory of its rank, before the scale of a microbatch."""
    delays: tuple[float, ...]
    """The time of a message on each edge if it does not wait; zero between stages of one rank.

    If microbatches differ, it is that of one of mean size.
    """
    offsets: tuple[float, ...]
    """The time subtracted from each rank's end: when it can first start, by span; 0, by makespan.

    Both clocks measure the largest end minus offset: a rank's first action is the forward of the
    first microbatch, which starts as early as possible. If `forwards` has another first one, its
    start counts instead.
    """
    sequence: tuple[int, ...] = ()
    """The microbatches in the order in which they run, if they differ; empty if all are alike."""
    forwards: tuple[tuple[int, ...], ...] = ()
    """By stage: the order of its F, as places in `sequence`; empty if all are in its order."""
    backwards: tuple[tuple[int, ...], ...] = ()
    """The same for I and B."""
    weights: tuple[tuple[int, ...], ...] = ()
    """By stage and place in `sequence`: the turn of W among those that wait; empty if as the I."""
    may_recompute: bool = False
    """True if a schedule may drop what forwards compute, and recompute it for their backwards."""
    dropping: tuple[Change, ...] = ()
    """By stage: what a forward that is recomputed does to memory."""
    recomputing: tuple[Change, ...] = ()
    """By stage: what a recomputation does to memory."""

    @classmethod
    def of(
        cls,
        costs: CostTable,
        placement: Placement,
        num_microbatches: int,
        *,
        memory: float | Iterable[float] | None = None,
        clock: Clock = "makespan",
        recompute: bool = False,
    ) -> "Problem":
        """Check the arguments and return the problem that they describe."""
        check_problem(costs, placement, num_microbatches, clock)
        num_ranks = placement.num_ranks
        caps = cap_of_each_rank("memory", inf if memory is None else memory, num_ranks)
        stages_of = tuple(placement.stages_of(rank) for rank in range(num_ranks))
        rows = (costs.forward, costs.backward_input, costs.backward_weight, costs.backward)
        durations = tuple(time for stage in zip(*rows, strict=True) for time in stage)
        by_stage = [stage_changes(costs, stage) for stage in range(placement.num_stages)]
        changes = tuple(changes[kind] for changes in by_stage for kind in KINDS)
        recomputing = tuple(changes[Recompute] for changes in by_stage)
        named = Named.of(durations, changes, costs)
        num_codes = len(durations)
        means = tuple(fmean(named.times[code::num_codes]) for code in range(num_codes))
        if recompute:
            named = named.with_recomputations(costs, recomputing, num_microbatches)
        problem = cls(
            costs=costs,
            placement=placement,
            num_microbatches=num_microbatches,
            caps=caps,
            clock=clock,
            stages_of=stages_of,
            durations=means,
            named=named,
            changes=changes,
            delays=_delays(costs, placement, fmean(costs.memory_scale or (1.0,))),
            offsets=(),
            sequence=tuple(range(costs.num_microbatches or 0)),
            may_recompute=recompute,
            dropping=tuple(dropping_change(costs, s) for s in range(placement.num_stages)),
            recomputing=recomputing,
        )
        return replace(problem, offsets=problem._offsets(0))

    def _offsets(self, first: int) -> tuple[float, ...]:
        """Return the offsets if this microbatch is the first on all ranks."""
        if self.clock == "makespan":
            return (0.0,) * self.num_ranks
        start = 4 * self.num_stages * first
        forwards = self.named.times[start + FORWARD : start + 4 * self.num_stages : 4]
        steps = (f + d for f, d in zip(forwards, (*self.delays_of(first), 0.0), strict=True))
        starts = (0.0, *accumulate(steps))
        return tuple(starts[stages[0]] for stages in self.stages_of)

    def delays_of(self, mb: int) -> tuple[float, ...]:
        """Return the times of the messages of a microbatch; see `delays`."""
        if not self.costs.memory_scale:
            return self.delays
        return _delays(self.costs, self.placement, self.costs.memory_scale[mb])

    def rearranged(self, places: Sequence[int]) -> "Problem":
        """Return the same problem with its microbatches in another sequence.

        `places` are places in the sequence of this problem, as in `[1, 0, 2]`.
        """
        return replace(
            self,
            sequence=tuple([self.sequence[place] for place in places]),
            offsets=self._offsets(self.sequence[places[0]]),
        )

    @property
    def arrangement(self) -> dict[str, Any]:
        """The orders of microbatches, by field: of all actions; of F, I and W by stage."""
        names = ("sequence", "forwards", "backwards", "weights")
        return {name: getattr(self, name) for name in names}

    @property
    def forward_places(self) -> Sequence[Sequence[int]]:
        """By stage: the places in the sequence as its F run."""
        return self.forwards or self._usual_places

    @property
    def backward_places(self) -> Sequence[Sequence[int]]:
        """By stage: the places in the sequence as its I or B run."""
        return self.backwards or self._usual_places

    @property
    def _usual_places(self) -> Sequence[Sequence[int]]:
        return (range(self.num_microbatches),) * len(self.placement.ranks)

    def name_all(self, order: Order) -> Order:
        """Return the order with codes that name microbatches; the same one if they are alike."""
        return self.name_at(order, self.places_of(order)) if self.sequence else order

    def name_at(self, order: Order, places: Sequence[int]) -> Order:
        """Return the order with codes that name the microbatches at these places."""
        pairs = zip(order, places, strict=True)
        if self.may_recompute:
            return [self.name(code, place) for code, place in pairs]
        step = 4 * self.num_stages
        offsets = [step * mb for mb in self.sequence]
        return [code + offsets[place] for code, place in pairs]

    def name(self, code: Code, place: int) -> Code:
        """Return a code that names the microbatch at a place in the sequence; see `Named`."""
        if not self.sequence:
            return code
        number = self.sequence[place]
        if self.recomputes(code):
            number += len(self.sequence) - 1 - place
        return code + 4 * self.num_stages * number

    @property
    def sizes(self) -> tuple[float, ...]:
        """By place in the sequence: the scale of the memory of a microbatch."""
        scales = self.costs.memory_scale
        if not scales:
            return (1.0,) * self.num_microbatches
        return tuple([scales[mb] for mb in self.sequence])

    def places_of(self, order: Order) -> list[int]:
        """Return the place in the sequence of the microbatch of each action.

        The n-th F is of the n-th microbatch, and so is the n-th I or B, unless `forwards` or
        `backwards` have another order; W are in the order of the I, or of `weights`. A W before its
        I, which cannot run, has the first place.
        """
        weights, num_stages = self.weights, len(self.placement.ranks)
        forward_places, backward_places = self.forward_places, self.backward_places
        first_recomputation = 4 * num_stages
        forwards, backwards = [0] * num_stages, [0] * num_stages
        pending: list[list[int]] = [[] for _ in range(num_stages)]
        places = []
        for code in order:
            stage, kind = code >> 2, code & 3
            if code >= first_recomputation:
                place = stage // num_stages - 1
            elif kind == FORWARD:
                place = forward_places[stage][forwards[stage]]
                forwards[stage] += 1
            elif kind == WEIGHT:
                waiting = pending[stage]
                place = take_waiting(waiting, weights[stage] if weights else ()) if waiting else 0
            else:
                place = backward_places[stage][backwards[stage]]
                backwards[stage] += 1
                if kind == INPUT:
                    pending[stage].append(place)
            places.append(place)
        return places

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
        largest = max(self.costs.memory_scale, default=1.0)
        needs_from = self.needs_with_drops if self.may_recompute else self.needs_from
        return tuple(float(needs_from(rank)[0]) * largest for rank in range(self.num_ranks))

    def needs_from(self, rank: int) -> list[float]:
        """Return what a microbatch of scale 1 still needs on `rank` after its first n forwards.

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

    def needs_with_drops(self, rank: int) -> list[float]:
        """Return `needs_from` if the forwards that are left may be recomputed.

        It leaves out what the stages of the first n forwards need for their backwards.
        """
        needed = 0.0
        found = [needed]
        for stage in reversed(self.stages_of[rank]):
            needed = min(self._need_of_stage(stage, needed))
            found.append(needed)
        return found[::-1]

    def _need_of_stage(self, stage: int, inner: float) -> tuple[float, float]:
        """Return what a microbatch needs on `stage` if F keeps its values, and if it drops them.

        `inner` is what it needs between F and the backward.
        """
        forward, dropping = self.changes[4 * stage + FORWARD], self.dropping[stage]
        kept, dropped = forward.net, dropping.net
        backward = kept + self.least_rise(stage)
        again = dropped + self.recomputing[stage].rise
        return (
            max(forward.rise, kept + inner, backward),
            max(dropping.rise, dropped + inner, again, backward),
        )

    @property
    def better_dropped(self) -> tuple[int, ...]:
        """The stages on which one microbatch alone needs less memory if it is recomputed."""
        found = []
        for rank, stages in enumerate(self.stages_of):
            inner = self.needs_with_drops(rank)[1:]
            for stage, need in zip(stages, inner, strict=True):
                kept, dropped = self._need_of_stage(stage, need)
                if self.may_recompute and dropped < kept:
                    found.append(stage)
        return tuple(sorted(found))

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

    def saves_by_dropping(self, stage: int) -> bool:
        """Return whether a forward of `stage` holds or needs less if it is recomputed."""
        needs_less = self.dropping[stage].rise < self.changes[4 * stage + FORWARD].rise
        return needs_less or self.recomputing[stage].net > 0

    def recomputation(self, stage: int, place: int) -> Code:
        """Return the code of the recomputation of the microbatch at a place in the sequence."""
        return 4 * (self.num_stages * (place + 1) + stage) + WEIGHT

    def recomputed(self, code: Code) -> tuple[int, int]:
        """Return the stage of a recomputation, and the place of its microbatch."""
        number, stage = divmod(code >> 2, self.num_stages)
        return stage, number - 1

    def recomputes(self, code: Code) -> bool:
        """Return whether a code of an order is that of a recomputation."""
        return code >= 4 * self.num_stages

    def schedule(self, orders: Sequence[Order]) -> Schedule:
        """Return the orders as a schedule."""
        return Schedule(map(self._actions, orders), self.placement, self.num_microbatches)

    def _actions(self, order: Order) -> Iterator[Action]:
        for code, place in zip(order, self.places_of(order), strict=True):
            mb = self.sequence[place] if self.sequence else place
            if self.recomputes(code):
                yield Recompute(self.recomputed(code)[0], mb)
            else:
                yield KINDS[code & 3](code >> 2, mb)


def take_waiting(waiting: list[int], turns: Sequence[int]) -> int:
    """Take away the place whose W is next: the one with the first turn, or the first that waits."""
    if not turns:
        return waiting.pop(0)
    place = min(waiting, key=turns.__getitem__)
    waiting.remove(place)
    return place


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


def _delays(costs: CostTable, placement: Placement, size: float) -> tuple[float, ...]:
    """Return the times of messages of a microbatch of this scale, if none waits for another."""
    ranks = placement.ranks
    return tuple(
        0.0 if ranks[edge] == ranks[edge + 1] else delay + transfer * size
        for edge, (delay, transfer) in enumerate(zip(costs.delay, costs.transfer, strict=True))
    )

"""Add the gathers, frees and reductions of stages whose parameters are sharded over replicas.

A forward, a full backward and an input backward need the parameters of their stage; a weight
backward does not, except on the first stage. Between two compute actions of a rank, what is no
longer needed is freed first, then gathers are issued, then gradients are reduced: nothing on the
rank waits for a reduction.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from penstock.errors import ScheduleError
from penstock.ir import (
    Action,
    Backward,
    BackwardWeight,
    ReduceGrads,
    Reshard,
    Schedule,
    Send,
    StageId,
    Unshard,
)
from penstock.ir.action import (
    SHARDING_TYPES,
    Compute,
    Sharding,
    compute_parts,
    gathered_stages,
    is_compute,
)
from penstock.passes.verification import verify


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Gathers:
    """A policy of gathers: how long stages stay gathered, and how early they are gathered.

    >>> print(Gathers.once(), Gathers.per_need(ahead=0), Gathers.at_most(2), sep="; ")
    once; per-need,ahead:0; at-most:2
    """

    most: float = inf
    """The most stages that a rank has gathered at once; infinite if there is no limit."""
    frees_between: bool = False
    """True if a stage is also freed where it is needed again later."""
    ahead: int = 1
    """How many compute actions before it is needed a stage is gathered, so that none waits."""
    stages_ahead: int = 0
    """If not 0, used in place of `ahead`: the number of stages that are gathered early, which are
    the next different ones that compute actions need, however many actions before."""

    def __post_init__(self) -> None:
        if not (_is_whole(self.most) or self.most == inf) or self.most < 1:
            raise ScheduleError(
                f"most is {self.most!r}. Expected a whole number of stages, at least 1; "
                "or Gathers.once() for no limit."
            )
        if not _is_whole(self.ahead) or self.ahead < 0:
            raise ScheduleError(
                f"ahead is {self.ahead!r}. Expected a whole number of compute actions, at least 0."
            )
        if not _is_whole(self.stages_ahead) or not 0 <= self.stages_ahead <= self.most:
            limit = "" if self.most == inf else f", and at most {self.most}, which may be gathered"
            raise ScheduleError(
                f"stages_ahead is {self.stages_ahead!r}. Expected a whole number of stages, at "
                f"least 0{limit}."
            )
        if self.stages_ahead and self.ahead != 1:
            raise ScheduleError(
                f"both ahead ({self.ahead}) and stages_ahead ({self.stages_ahead}) are given. "
                "Expected one of them: actions or stages to gather early."
            )

    @classmethod
    def once(cls, *, ahead: int = 1) -> "Gathers":
        """Return the policy by which a stage is gathered once, and freed after its last use."""
        return cls(ahead=ahead)

    @classmethod
    def per_need(cls, *, ahead: int = 1) -> "Gathers":
        """Return the policy by which a stage is gathered for each run of actions that need it.

        Two runs with at most `ahead` compute actions between them share one gather: the second
        gather would begin where the first ends.
        """
        return cls(frees_between=True, ahead=ahead)

    @classmethod
    def at_most(cls, most: int, *, ahead: int = 1, stages_ahead: int = 0) -> "Gathers":
        """Return the policy by which a rank has at most `most` stages gathered.

        When it needs another, it frees the one that it will need last. No order of frees takes
        fewer gathers.
        """
        return cls(most=most, ahead=ahead, stages_ahead=stages_ahead)

    def __str__(self) -> str:
        parts = {
            "per-need": self.frees_between,
            f"at-most:{self.most}": self.most < inf,
            "once": not self.frees_between and self.most == inf,
            f"ahead:{self.ahead}": self.ahead != 1 and not self.stages_ahead,
            f"stages-ahead:{self.stages_ahead}": self.stages_ahead > 0,
        }
        return ",".join(part for part, is_meant in parts.items() if is_meant)


def add_gathers(
    schedule: Schedule,
    policy: Gathers | Sequence[Gathers],
    stages: Iterable[StageId] | None = None,
) -> Schedule:
    """Return the schedule with the gathers, frees and reductions of `stages`, or of all stages.

    `policy` is for all ranks, or a sequence with one for each.
    Gradients are reduced after a stage's last weight backward. Other actions stay in their order.

    >>> schedule = Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\\n")
    >>> print(add_gathers(schedule, Gathers.once()).to_csv(), end="")
    0UNSHARD,0F0,0F1,0I0,0W0,0I1,0W1,0RESHARD,0REDUCE_GRAD
    """
    policies = _policies(policy, schedule.num_ranks)
    if schedule.has_sharding:
        raise ScheduleError(
            "The schedule already has gathers, frees or reductions. "
            "Give add_gathers a schedule without them, such as remove_gathers returns."
        )
    verify(schedule)
    sharded = _checked(stages, schedule.num_stages)
    return schedule.with_orders(
        list(_with_gathers(order, _plan(order, policies[rank], sharded, rank)))
        for rank, order in enumerate(schedule.orders)
    )


def remove_gathers(schedule: Schedule) -> Schedule:
    """Return the schedule without its gathers, frees and reductions."""
    return schedule.with_orders(
        [action for action in order if not isinstance(action, SHARDING_TYPES)]
        for order in schedule.orders
    )


def _policies(policy: Gathers | Sequence[Gathers], num_ranks: int) -> list[Gathers]:
    """Return the policy of each rank."""
    given = [policy] * num_ranks if isinstance(policy, Gathers) else policy
    are_known = isinstance(given, Sequence) and all(isinstance(one, Gathers) for one in given)
    if not are_known or len(given) != num_ranks:
        raise ScheduleError(
            f"policy is {policy!r}. Expected a penstock.passes.Gathers, such as Gathers.once(), or "
            f"one for each of the {num_ranks} ranks."
        )
    return list(given)


def _checked(stages: Iterable[StageId] | None, num_stages: int) -> frozenset[StageId]:
    if stages is None:
        return frozenset(range(num_stages))
    chosen = frozenset(stages)
    if strange := chosen.difference(range(num_stages)):
        raise ScheduleError(
            f"stages has {min(strange)}. Expected stages from 0 to {num_stages - 1}."
        )
    return chosen


def _with_gathers(order: tuple[Action, ...], plan: list[list[Sharding]]) -> Iterator[Action]:
    """Yield the order with `plan[n]` before compute action n, and after the sends before that."""
    number = 0
    is_due = True  # The actions before the next compute have not been placed.
    for action in order:
        if is_due and not isinstance(action, Send):
            yield from plan[number]
            is_due = False
        yield action
        if is_compute(action):
            number, is_due = number + 1, True
    if is_due:
        yield from plan[number]


def _plan(
    order: tuple[Action, ...], policy: Gathers, stages: frozenset[StageId], rank: int
) -> list[list[Sharding]]:
    """Return what to do before each compute action of a rank, and after the last."""
    computes = [action for action in order if is_compute(action)]
    needs = [_needed(action, stages) for action in computes]
    uses = _Uses(needs)
    reduced = _reductions(computes, stages)
    gathered: list[StageId] = []  # In the order in which they were gathered.
    plan: list[list[Sharding]] = []
    for now in range(len(computes) + 1):
        before = list(gathered)
        last = uses.last_seen(now, policy)
        _free(gathered, uses, now, last if policy.frees_between else inf)
        for place in range(now, min(last + 1, len(computes))):
            if len(needs[place]) > policy.most:
                raise ScheduleError(
                    f"The policy is {policy}, but {computes[place]} on rank {rank} needs "
                    f"{len(needs[place])} stages at once. Allow at least that many."
                )
            if not _gather(gathered, needs, uses, now, place, policy.most):
                break  # Later ones would take the room that this one needs.
        plan.append(
            [
                *(Reshard(stage) for stage in before if stage not in gathered),
                *(Unshard(stage) for stage in gathered if stage not in before),
                *(ReduceGrads(stage) for stage in reduced.get(now - 1, ())),
            ]
        )
    return plan


class _Uses:
    """The places of the compute actions that need each stage."""

    def __init__(self, needs: list[tuple[StageId, ...]]) -> None:
        self._places: dict[StageId, list[int]] = {}
        for place, stages in enumerate(needs):
            for stage in stages:
                self._places.setdefault(stage, []).append(place)

    def last_seen(self, now: int, policy: Gathers) -> int:
        """Return the last place whose stages the policy gathers before the action at `now`."""
        if not policy.stages_ahead:
            return now + policy.ahead
        following = sorted(self.following(stage, now) for stage in self._places)
        seen = [int(use) for use in following[: policy.stages_ahead] if use < inf]
        return seen[-1] if seen else now

    def following(self, stage: StageId, place: int) -> float:
        """Return the first use of `stage` at `place` or later; infinite if there is none."""
        places = self._places[stage]
        index = bisect_left(places, place)
        return places[index] if index < len(places) else inf


def _free(gathered: list[StageId], uses: _Uses, now: int, last: float) -> None:
    """Free the stages that are not needed any more, or not until the place `last`."""
    gathered[:] = [
        stage for stage in gathered if (use := uses.following(stage, now)) < inf and use <= last
    ]


def _gather(
    gathered: list[StageId],
    needs: list[tuple[StageId, ...]],
    uses: _Uses,
    now: int,
    place: int,
    most: float,
) -> bool:
    """Gather before action `now` what action `place` needs; return False if there is no room.

    A stage is freed for it only if it is not needed in between, and only the one that is needed
    last, so that gathering early does not take more gathers.
    """
    for stage in needs[place]:
        if stage in gathered:
            continue
        if len(gathered) >= most:
            victim = max(gathered, key=lambda other: uses.following(other, place))
            if uses.following(victim, now) <= place:
                return False
            gathered.remove(victim)
        gathered.append(stage)
    return True


def _needed(action: Compute, stages: frozenset[StageId]) -> tuple[StageId, ...]:
    """Return the stages that must be gathered for an action.

    The inputs of the first stage rarely need gradients. All of its backward is then left to W.
    """
    needed = {part.stage for part in compute_parts(action) if part.stage == 0}
    return tuple(sorted(stages.intersection(needed.union(gathered_stages(action)))))


def _reductions(computes: list[Compute], stages: frozenset[StageId]) -> dict[int, list[StageId]]:
    """Return the stages whose gradients are complete after each compute action."""
    last: dict[StageId, int] = {}
    for place, action in enumerate(computes):
        for part in compute_parts(action):
            if isinstance(part, Backward | BackwardWeight) and part.stage in stages:
                last[part.stage] = place
    reduced: dict[int, list[StageId]] = {}
    for stage, place in sorted(last.items()):
        reduced.setdefault(place, []).append(stage)
    return reduced

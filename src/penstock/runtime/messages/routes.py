"""What actions wait for, from neighbouring stages and from those further away.

A value that a later stage than the next one uses is sent there directly, past those in between:
it *skips* them. No schedule knows of this, and none need to: F(s) → F(s+1) → … → F(t) is in every
schedule already, and so is the way back, so a message from s to t adds no circle to what waits for
what. It is sent as soon as it is made, and is one more in the order of its channel.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from penstock.comm.channels import both_ways
from penstock.errors import AgreementError
from penstock.ir import Action, Forward, Rank, Schedule, StageId
from penstock.ir.action import URGENT_BACKWARD_TYPES
from penstock.ir.inputs import Channel, Described, Input, Inputs
from penstock.stage import PipelineStage

Skip: TypeAlias = tuple[StageId, StageId]
"""From which stage to which; never neighbours."""

Key: TypeAlias = Input | Described
"""An input: one of the schedule's, or one that skips stages, which is described in full."""


class Routes:
    """The inputs of a schedule, and those that skip stages; of an overlap, ask for its parts."""

    def __init__(self, schedule: Schedule, skips: Collection[Skip] = ()) -> None:
        self._inputs = Inputs(schedule)
        self._ranks = schedule.placement.ranks
        self._sources: dict[StageId, list[StageId]] = {}
        self._targets: dict[StageId, list[StageId]] = {}
        for source, target in sorted(skips):
            self._sources.setdefault(target, []).append(source)
            self._targets.setdefault(source, []).append(target)

    def channel(self, key: Key) -> Channel:
        """Who makes an input, and who needs it."""
        if isinstance(key, Described):
            return Channel(self._ranks[key.maker], self._ranks[key.stage])
        return self._inputs.channel(key)

    def is_message(self, key: Key) -> bool:
        """Whether an input comes from another rank."""
        sender, receiver = self.channel(key)
        return sender != receiver

    def describe(self, key: Key) -> Described:
        """An input in words that people use."""
        return key if isinstance(key, Described) else self._inputs.describe(key)

    def answered(self, key: Key) -> Key | None:
        """The activation that a gradient is the gradient of; None for an activation."""
        if isinstance(key, Described):
            return Described(False, key.stage, key.maker, key.mb) if key.is_gradient else None
        return self._inputs.answered(key)

    def needed_from_neighbour(self, action: Action) -> Input | None:
        return _only(self._inputs.needed(action))

    def made_for_neighbour(self, action: Action) -> Input | None:
        """What a compute action makes, or what a send sends."""
        return _only(self._inputs.made(action) or self._inputs.sent(action))

    def needed_from_afar(self, action: Action) -> tuple[Described, ...]:
        """What a compute action waits for that skips stages, by stage."""
        if isinstance(action, Forward):
            makers = self._sources.get(action.stage, ())
            return tuple(Described(False, maker, action.stage, action.mb) for maker in makers)
        if isinstance(action, URGENT_BACKWARD_TYPES):
            makers = self._targets.get(action.stage, ())
            return tuple(Described(True, maker, action.stage, action.mb) for maker in makers)
        return ()

    def made_for_afar(self, action: Action) -> tuple[Described, ...]:
        """What a compute action makes that skips stages, by stage."""
        if isinstance(action, Forward):
            takers = self._targets.get(action.stage, ())
            return tuple(Described(False, action.stage, taker, action.mb) for taker in takers)
        if isinstance(action, URGENT_BACKWARD_TYPES):
            takers = self._sources.get(action.stage, ())
            return tuple(Described(True, action.stage, taker, action.mb) for taker in takers)
        return ()

    def needed(self, action: Action) -> tuple[Key, ...]:
        """All that an action waits for."""
        return *self._inputs.needed(action), *self.needed_from_afar(action)

    def sent(self, action: Action) -> tuple[Key, ...]:
        """All that an action sends to other ranks: a send its message, others what skips stages."""
        skipping = filter(self.is_message, self.made_for_afar(action))
        return *self._inputs.sent(action), *skipping


def _only(keys: tuple[Input, ...]) -> Input | None:
    return keys[0] if keys else None


@dataclass(frozen=True, slots=True)
class RankSkips:
    """What the stages of one rank send past others, and what they take: how many values."""

    sent: dict[Skip, int]
    taken: dict[Skip, int]

    @classmethod
    def of(cls, stages: Iterable[PipelineStage]) -> "RankSkips":
        held = list(stages)
        return cls(
            {(s.stage_index, to): count for s in held for to, count in s.skips_out.items()},
            {(since, s.stage_index): count for s in held for since, count in s.skips_in.items()},
        )

    @property
    def all(self) -> set[Skip]:
        return {*self.sent, *self.taken}


def used_channels(schedule: Schedule, skips: Iterable[Skip]) -> set[Channel]:
    """Return the channels of all messages between stages: neighbours, and the ends of skips."""
    ranks = schedule.placement.ranks
    edges = [*pairwise(ranks), *((ranks[s], ranks[t]) for s, t in skips)]
    if schedule.has_backward:
        return both_ways(edges)
    return {Channel(*edge) for edge in edges if edge[0] != edge[1]}


def check_skips(given: Sequence[RankSkips], ranks: Sequence[Rank]) -> None:
    """Raises if the two ends of a skip were not given the same number of values.

    `given` has what the stages of each rank send and take; `ranks` has the rank of each stage.
    """
    for skip in sorted({skip for known in given for skip in known.all}):
        source, target = skip
        sent = given[ranks[source]].sent.get(skip, 0)
        taken = given[ranks[target]].taken.get(skip, 0)
        if sent != taken:
            raise AgreementError(
                f"stage {source} on rank {ranks[source]} sends {sent} values to stage "
                f"{target}, but stage {target} on rank {ranks[target]} takes {taken} from it. "
                "Expected the same number: give skips_out and skips_in of one cut."
            )

"""The messages that the actions of a schedule wait for, make, send and receive.

A forward needs an activation from the stage before it, a backward a gradient from the stage after
it; where values skip stages, also from those further away. Every schedule has the chain
F(s) → F(s+1) → … → F(t), and the way back, so a message that skips stages never closes a circle
of waits.
"""

from collections.abc import Iterable
from itertools import pairwise

from penstock.ir.action import URGENT_BACKWARD_TYPES, Action, Forward, Overlap, Recv, Send
from penstock.ir.message import Channel, Message, Rank, Skip, StageId
from penstock.ir.schedule import Schedule


class Dataflow:
    """The messages of a schedule; actions must be of stages and microbatches that it has.

    `skips` are those of the schedule's own sends, unless others are given.
    """

    def __init__(self, schedule: Schedule, skips: Iterable[Skip] | None = None) -> None:
        self._ranks = schedule.placement.ranks
        self._num_microbatches = schedule.num_microbatches
        pairs = [*pairwise(range(schedule.num_stages))]
        pairs += schedule.skips if skips is None else skips
        # For each stage, the stages that make something for its forward, and those that take
        # something from it; a backward goes the other way. The smaller stage comes first.
        self._before: list[list[StageId]] = [[] for _ in self._ranks]
        self._after: list[list[StageId]] = [[] for _ in self._ranks]
        for source, target in sorted(pairs):
            self._before[target].append(source)
            self._after[source].append(target)

    def channel(self, message: Message) -> Channel:
        """Return the rank that makes a message and the rank that needs it."""
        return Channel(self._ranks[message.maker], self._ranks[message.taker])

    def sender(self, message: Message) -> Rank:
        return self._ranks[message.maker]

    def receiver(self, message: Message) -> Rank:
        return self._ranks[message.taker]

    def is_sent(self, message: Message) -> bool:
        """Return whether a message goes to another rank; otherwise it is handed over."""
        return self._ranks[message.maker] != self._ranks[message.taker]

    def partners(self, rank: Rank) -> list[Rank]:
        """Return the other ranks with which `rank` exchanges messages, in ascending order."""
        found = {
            self._ranks[other]
            for stage, holder in enumerate(self._ranks)
            if holder == rank
            for other in (*self._before[stage], *self._after[stage])
        }
        return sorted(found - {rank})

    # Called for every action, often: `match` would take twice as long.

    def needed(self, action: Action) -> tuple[Message, ...]:
        """Return the messages that a compute action waits for, sorted by stage."""
        if isinstance(action, Forward):
            makers, stage, mb = self._before[action.stage], action.stage, action.mb
        elif isinstance(action, URGENT_BACKWARD_TYPES):
            makers, stage, mb = self._after[action.stage], action.stage, action.mb
        elif isinstance(action, Overlap):
            return self.needed(action.forward) + self.needed(action.backward)
        else:
            return ()
        return tuple([Message(maker, stage, mb) for maker in makers])

    def made(self, action: Action) -> tuple[Message, ...]:
        """Return the messages that a compute action makes for other stages, sorted by stage."""
        if isinstance(action, Forward):
            takers, stage, mb = self._after[action.stage], action.stage, action.mb
        elif isinstance(action, URGENT_BACKWARD_TYPES):
            takers, stage, mb = self._before[action.stage], action.stage, action.mb
        elif isinstance(action, Overlap):
            return self.made(action.forward) + self.made(action.backward)
        else:
            return ()
        return tuple([Message(stage, taker, mb) for taker in takers])

    def has(self, message: Message) -> bool:
        """Return whether a stage makes this message for another."""
        maker, taker, mb = message
        if maker not in range(len(self._ranks)) or mb not in range(self._num_microbatches):
            return False
        ends = self._before[maker] if message.is_gradient else self._after[maker]
        return taker in ends


def sent_by(order: Iterable[Action]) -> list[Message]:
    """Return the messages that a rank sends, in order."""
    return [action.message for action in order if isinstance(action, Send)]


def received_by(order: Iterable[Action]) -> list[Message]:
    """Return the messages that a rank receives, in order."""
    return [action.message for action in order if isinstance(action, Recv)]

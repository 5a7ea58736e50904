"""Which messages the actions of a schedule wait for, make, send and receive.

A forward needs an activation from the stage before it, a backward a gradient from the stage after
it; where values skip stages, from those further away too. F(s) → F(s+1) → … → F(t) is in every
schedule, and so is the way back, so a message that skips stages adds no circle to what waits for
what.
"""

from collections.abc import Iterable
from itertools import pairwise

from penstock.ir.action import URGENT_BACKWARD_TYPES, Action, Forward, Overlap, Recv, Send
from penstock.ir.message import Channel, Message, Skip, StageId
from penstock.ir.schedule import Schedule


class Dataflow:
    """The messages of a schedule, for actions of stages and microbatches that it has.

    `skips` are those of the schedule's own sends, unless others are given.
    """

    def __init__(self, schedule: Schedule, skips: Iterable[Skip] | None = None) -> None:
        self._ranks = schedule.placement.ranks
        self._num_microbatches = schedule.num_microbatches
        pairs = [*pairwise(range(schedule.num_stages))]
        pairs += schedule.skips if skips is None else skips
        # By stage, those that make something for its forward, and those that take from it; a
        # backward goes the other way. The smaller stage comes first.
        self._before: list[list[StageId]] = [[] for _ in self._ranks]
        self._after: list[list[StageId]] = [[] for _ in self._ranks]
        for source, target in sorted(pairs):
            self._before[target].append(source)
            self._after[source].append(target)

    def channel(self, message: Message) -> Channel:
        """Who makes a message, and who needs it."""
        return Channel(self._ranks[message.maker], self._ranks[message.taker])

    def is_sent(self, message: Message) -> bool:
        """Whether it goes to another rank; otherwise it is handed over."""
        return self._ranks[message.maker] != self._ranks[message.taker]

    # All that goes through a schedule asks about every action: `match` would take twice as long.

    def needed(self, action: Action) -> tuple[Message, ...]:
        """What a compute action waits for, by stage."""
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
        """What a compute action makes for other stages, by stage."""
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
        """Whether a stage makes this message for another."""
        maker, taker, mb = message
        if maker not in range(len(self._ranks)) or mb not in range(self._num_microbatches):
            return False
        ends = self._before[maker] if message.is_gradient else self._after[maker]
        return taker in ends


def sent_by(order: Iterable[Action]) -> list[Message]:
    """What a rank sends, in order."""
    return [action.message for action in order if isinstance(action, Send)]


def received_by(order: Iterable[Action]) -> list[Message]:
    """What a rank receives, in order."""
    return [action.message for action in order if isinstance(action, Recv)]

"""What actions wait for.

A forward waits for an activation from the stage before, a backward for a gradient from the stage
after: its *input*. Inputs are numbered, because all that goes through a schedule asks about them
for every action: (stage, microbatch) has an activation, and behind all activations a gradient.
An input that comes from another rank is a message, and the two ranks are its channel.
"""

from typing import NamedTuple, TypeAlias

from penstock.ir.action import (
    URGENT_BACKWARD_TYPES,
    Action,
    Forward,
    MicrobatchId,
    Overlap,
    Rank,
    Recv,
    RecvActivation,
    RecvGradient,
    Send,
    SendActivation,
    SendGradient,
    StageId,
)
from penstock.ir.schedule import Schedule

Input: TypeAlias = int


class Channel(NamedTuple):
    """From one rank to another; its messages stay in order."""

    sender: Rank
    receiver: Rank


class Described(NamedTuple):
    """What an input is, and between which stages it passes."""

    is_gradient: bool
    maker: StageId
    stage: StageId
    mb: MicrobatchId


class Inputs:
    """The inputs of a schedule: which an action needs, makes, sends or receives."""

    def __init__(self, schedule: Schedule) -> None:
        self._num_stages = schedule.num_stages
        self._num_microbatches = schedule.num_microbatches
        ranks = schedule.placement.ranks
        down = [Channel(a, b) for a, b in zip((ranks[0], *ranks), ranks, strict=False)]
        up = [Channel(a, b) for a, b in zip((*ranks[1:], ranks[-1]), ranks, strict=True)]
        # By kind and stage; the first stage's activation and the last one's gradient do not exist.
        self._channels = down + up
        self._is_message = [channel.sender != channel.receiver for channel in self._channels]

    def edge(self, key: Input) -> int:
        """Numbers the pairs of neighbouring stages, there and back: an index below twice their
        number, the same for all microbatches."""
        return key // self._num_microbatches

    def channel(self, key: Input) -> Channel:
        """Who makes an input, and who needs it."""
        return self._channels[key // self._num_microbatches]

    def is_message(self, key: Input) -> bool:
        """Whether an input comes from another rank."""
        return self._is_message[key // self._num_microbatches]

    def describe(self, key: Input) -> Described:
        """An input in words that people use."""
        edge, mb = divmod(key, self._num_microbatches)
        is_gradient, stage = divmod(edge, self._num_stages)
        return Described(is_gradient > 0, stage + 1 if is_gradient else stage - 1, stage, mb)

    def answered(self, key: Input) -> Input | None:
        """The activation that a gradient is the gradient of; None for an activation."""
        is_gradient, maker, _, mb = self.describe(key)
        return maker * self._num_microbatches + mb if is_gradient else None

    def send(self, key: Input) -> Send:
        """The action that sends an input."""
        is_gradient, maker, _, mb = self.describe(key)
        return SendGradient(maker, mb) if is_gradient else SendActivation(maker, mb)

    def recv(self, key: Input) -> Recv:
        """The action that receives an input."""
        is_gradient, _, stage, mb = self.describe(key)
        return RecvGradient(stage, mb) if is_gradient else RecvActivation(stage, mb)

    # Below, `match` would take twice as long.

    def needed(self, action: Action) -> tuple[Input, ...]:
        """What a compute action waits for."""
        if isinstance(action, Forward):
            return self._activation(action.stage, action.mb)
        if isinstance(action, URGENT_BACKWARD_TYPES):
            return self._gradient(action.stage, action.mb)
        if isinstance(action, Overlap):
            return self.needed(action.forward) + self.needed(action.backward)
        return ()

    def made(self, action: Action) -> tuple[Input, ...]:
        """What a compute action makes for other stages."""
        if isinstance(action, Forward):
            return self._activation(action.stage + 1, action.mb)
        if isinstance(action, URGENT_BACKWARD_TYPES):
            return self._gradient(action.stage - 1, action.mb)
        if isinstance(action, Overlap):
            return self.made(action.forward) + self.made(action.backward)
        return ()

    def sent(self, action: Action) -> tuple[Input, ...]:
        """What a send sends."""
        if isinstance(action, SendActivation):
            return self._activation(action.stage + 1, action.mb)
        if isinstance(action, SendGradient):
            return self._gradient(action.stage - 1, action.mb)
        return ()

    def received(self, action: Action) -> tuple[Input, ...]:
        """What a receive receives."""
        if isinstance(action, RecvActivation):
            return self._activation(action.stage, action.mb)
        if isinstance(action, RecvGradient):
            return self._gradient(action.stage, action.mb)
        return ()

    def _activation(self, stage: StageId, mb: MicrobatchId) -> tuple[Input, ...]:
        """What `stage` waits for in its forward: nothing if there is no stage before it."""
        if 0 < stage < self._num_stages:
            return (stage * self._num_microbatches + mb,)
        return ()

    def _gradient(self, stage: StageId, mb: MicrobatchId) -> tuple[Input, ...]:
        """What `stage` waits for in its backward: nothing if there is no stage after it."""
        if 0 <= stage < self._num_stages - 1:
            return ((self._num_stages + stage) * self._num_microbatches + mb,)
        return ()

"""Messages: the values that stages make for each other, one for each microbatch."""

from typing import NamedTuple, TypeAlias

# Plain integers under three names: a schedule is arithmetic on them, and its author writes 0F1 as
# Forward(0, 1).
Rank: TypeAlias = int
"""The number of a rank, from 0."""
StageId: TypeAlias = int
"""The number of a stage along the data path, from 0."""
MicrobatchId: TypeAlias = int
"""The number of a microbatch in its batch, from 0."""


class Channel(NamedTuple):
    """An ordered pair of ranks; its messages arrive in the order in which they were sent."""

    sender: Rank
    receiver: Rank


class Skip(NamedTuple):
    """A pair of stages that are not neighbours: `target` uses a value that `source` makes."""

    source: StageId
    target: StageId


class Message(NamedTuple):
    """The value that stage `maker` makes for stage `taker`, for microbatch `mb`.

    It is an activation to a later stage, and a gradient to an earlier one. If both stages are on
    one rank it is handed over; otherwise it is sent.
    """

    maker: StageId
    taker: StageId
    mb: MicrobatchId

    @property
    def is_gradient(self) -> bool:
        return self.taker < self.maker

    @property
    def kind(self) -> str:
        """The kind of message, in one word."""
        return "gradient" if self.is_gradient else "activation"

    @property
    def answer(self) -> "Message":
        """The gradient of an activation, or the activation that a gradient belongs to."""
        return Message(self.taker, self.maker, self.mb)

    @property
    def edge(self) -> int:
        """The smaller of the two stages: neighbours s and s + 1 are joined by edge s."""
        return min(self.maker, self.taker)

    @property
    def skip(self) -> Skip | None:
        """The skip that it belongs to; None between neighbours."""
        first, last = sorted((self.maker, self.taker))
        return Skip(first, last) if last - first > 1 else None

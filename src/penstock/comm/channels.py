"""The channels that a rank has opened, and the order in which ranks open them.

An NCCL communicator blocks the host at its first use until the other end uses it too. If each
rank had its own order, ranks could wait for each other in a circle. So all of them follow one
total order: the first channel in it that is not connected yet is the next one at both of its
ends, so some channel can always be connected.
"""

from collections.abc import Callable, Iterable

from penstock.errors import CommError
from penstock.ir import Rank
from penstock.ir.message import Channel


class OpenChannels:
    """The channels that `rank` has opened."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._opened: set[tuple[Rank, Rank]] = set()

    def open(self, channels: Iterable[Channel], connect: Callable[[Channel], None]) -> None:
        """Call `connect` for each of this rank's channels that is not open yet."""
        own = {channel for channel in channels if self._rank in channel} - self._opened
        for channel in sorted(own, key=turn):
            connect(channel)
            self._opened.add(channel)

    def check(self, sender: Rank, receiver: Rank) -> None:
        """Raise an error unless the channel is open."""
        if (sender, receiver) not in self._opened:
            raise CommError(
                f"the channel from rank {sender} to rank {receiver} is not open. Expected a "
                "channel that both ranks have opened: let all ranks call open() with it before "
                "its first message."
            )


def turn(channel: Channel) -> tuple[int, int, bool, Rank]:
    """Return the place of a channel in the order in which all ranks connect."""
    low, high = sorted(channel)
    distance = high - low
    # Channels that differ only in the rank do not share an end, so they connect at the same time:
    # a chain of any length, in both directions, takes as long as four channels.
    return distance, low // distance % 2, channel.sender > channel.receiver, low


def both_ways(pairs: Iterable[tuple[Rank, Rank]]) -> set[Channel]:
    """Return the channels in both directions between the ranks of each pair that differ."""
    return {
        channel
        for one, other in pairs
        if one != other
        for channel in (Channel(one, other), Channel(other, one))
    }

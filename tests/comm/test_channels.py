"""Channels: opened once, in one order for all ranks, and refused before."""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples
from penstock.comm.channels import OpenChannels, both_ways, turn
from penstock.errors import CommError
from penstock.ir.message import Channel

CHANNELS = st.sets(
    st.tuples(st.integers(0, 11), st.integers(0, 11))
    .filter(lambda ends: ends[0] != ends[1])
    .map(lambda ends: Channel(*ends))
)


def test_channel_that_is_not_open_is_refused() -> None:
    channels = OpenChannels(1)
    channels.open([Channel(1, 0)], lambda channel: None)
    channels.check(1, 0)
    expected = (
        "the channel from rank 0 to rank 1 is not open. Expected a channel that both ranks have "
        "opened: let all ranks call open() with it before its first message."
    )
    with pytest.raises(CommError, match=f"^{re.escape(expected)}$"):
        channels.check(0, 1)


def test_rank_connects_its_own_channels_and_each_once() -> None:
    connected: list[Channel] = []
    channels = OpenChannels(1)
    channels.open(both_ways([(0, 1), (2, 3)]), connected.append)
    channels.open(both_ways([(0, 1), (1, 2)]), connected.append)
    assert sorted(both_ways([(0, 1), (1, 2)])) == sorted(connected)


def test_channel_that_could_not_be_connected_is_not_open() -> None:
    def refuse(channel: Channel) -> None:
        raise RuntimeError("no")

    channels = OpenChannels(0)
    with pytest.raises(RuntimeError, match=r"^no$"):
        channels.open([Channel(0, 1)], refuse)
    with pytest.raises(CommError, match="is not open"):
        channels.check(0, 1)


def test_rank_has_no_channel_to_itself() -> None:
    assert {Channel(0, 1), Channel(1, 0)} == both_ways([(0, 1), (1, 0), (2, 2)])


def _count_rounds(channels: Collection[Channel]) -> int:
    """How long opening takes, if connecting one channel takes 1 and keeps both of its ranks busy.

    Each rank connects its own in order; a connection begins when both ends have come to it.
    """
    orders: defaultdict[int, list[Channel]] = defaultdict(list)
    for rank in {rank for channel in channels for rank in channel}:
        connected: list[Channel] = []
        OpenChannels(rank).open(channels, connected.append)
        orders[rank] = connected
    num_rounds = 0
    while any(orders.values()):
        num_rounds += 1
        nexts = [order[0] for order in orders.values() if order]
        ready = {channel for channel in nexts if nexts.count(channel) == 2}
        assert ready, f"no rank can go on: {dict(orders)}"
        for order in orders.values():
            if order and order[0] in ready:
                order.pop(0)
    return num_rounds


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 17, 64])
def test_chain_of_any_length_opens_in_four_rounds(num_ranks: int) -> None:
    chain = both_ways(itertools.pairwise(range(num_ranks)))
    assert (2 if num_ranks == 2 else 4) == _count_rounds(chain)


def test_star_opens_one_channel_after_the_other() -> None:
    """Rank 0 has an end of each, so nothing can be quicker."""
    assert 2 * 15 == _count_rounds(both_ways((0, rank) for rank in range(1, 16)))


def test_all_channels_of_many_ranks_open_in_four_rounds_for_each_distance() -> None:
    everyone = both_ways(itertools.combinations(range(16), 2))
    assert 2 * 15 <= _count_rounds(everyone) <= 4 * 15


@pytest.mark.fuzz
@examples(100, long=5000)
@given(channels=CHANNELS)
def test_any_channels_can_be_opened(channels: set[Channel]) -> None:
    assert len(channels) == len({turn(channel) for channel in channels})
    _count_rounds(channels)

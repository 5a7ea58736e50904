"""NCCL's links over an imitation of NCCL, and how their two ends meet."""

import re
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from imitated_nccl import ImitatedComm, Pairs
from penstock import LocalGroup, local_ranks
from penstock.comm.channels import both_ways
from penstock.comm.links import meet
from penstock.errors import CommError
from penstock.ir.message import Channel


def _in_circle(comm: ImitatedComm) -> float:
    """Send to the next rank, and receive from the one before."""
    received = torch.empty(1)
    after, before = (comm.rank + 1) % comm.num_ranks, (comm.rank - 1) % comm.num_ranks
    sent = comm.send(torch.tensor([float(comm.rank)]), after)
    comm.recv(received, before).wait(lambda: "")
    sent.wait(lambda: "")
    return received.item()


def test_only_opened_channels_have_a_communicator() -> None:
    pairs: Pairs = {}
    ring = [Channel(0, 1), Channel(1, 2), Channel(2, 0)]

    def main(group: LocalGroup) -> tuple[float, list[Channel]]:
        comm = ImitatedComm(group, pairs)
        comm.open(ring)
        return _in_circle(comm), sorted(comm.ends)

    results = local_ranks(3, main)
    assert [2, 0, 1] == [received for received, _ in results]
    assert [sorted(c for c in ring if rank in c) for rank in range(3)] == [
        ends for _, ends in results
    ]
    assert set(ring) == set(pairs)


def test_message_on_a_channel_that_is_not_open_is_refused() -> None:
    def main(group: LocalGroup) -> None:
        comm = ImitatedComm(group, {})
        if group.rank == 0:
            comm.send(torch.ones(1), 1)
        else:
            comm.recv(torch.ones(1), 0)

    with pytest.raises(CommError, match=r"^the channel from rank 0 to rank 1 is not open"):
        local_ranks(2, main)


def test_close_aborts_the_groups_of_both_directions() -> None:
    pairs: Pairs = {}

    def main(group: LocalGroup) -> list[bool]:
        comm = ImitatedComm(group, pairs)
        comm.open(both_ways([(0, 1)]))
        comm.close()
        return [end.is_aborted for end in comm.ends.values()]

    assert [[True, True], [True, True]] == local_ranks(2, main)


def test_imitation_tells_of_ranks_that_first_use_channels_in_a_circle() -> None:
    pairs: Pairs = {}

    def main(group: LocalGroup) -> None:
        comm = ImitatedComm(group, pairs)
        own, other = Channel(group.rank, 1 - group.rank), Channel(1 - group.rank, group.rank)
        for channel in (own, other):
            comm.open([channel])

    waits = "rank 0 waits for a first use of 0 to 1; rank 1 waits for a first use of 1 to 0"
    with pytest.raises(CommError, match=re.escape(f"no rank can go on: {waits}")):
        local_ranks(2, main)


def test_imitation_ends_a_send_only_when_it_is_received() -> None:
    pairs: Pairs = {}

    def main(group: LocalGroup) -> None:
        comm = ImitatedComm(group, pairs)
        comm.open([Channel(0, 1)])
        if group.rank == 0:
            comm.send(torch.ones(1), 1).wait(lambda: "")

    with pytest.raises(CommError, match="rank 0 waits for a message from 0 to 1 to be received"):
        local_ranks(2, main)


def test_ends_meet_whoever_comes_first() -> None:
    store = HashStore()
    late = threading.Timer(0.1, meet, (store, 1, 0, 5.0))
    late.start()
    meet(store, 0, 1, 5.0)
    late.join()


def test_end_that_does_not_come_is_not_waited_for_longer_than_the_timeout() -> None:
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="timeout"):
        meet(HashStore(), 0, 1, 0.1)
    assert time.monotonic() - began_s < 5

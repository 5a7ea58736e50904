"""Ranks as threads of one process: same run every time, failures that reach all, no hangs."""

import itertools
import re
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples
from penstock import LocalGroup, local_ranks
from penstock.comm import AbstractComm
from penstock.comm.channels import both_ways
from penstock.errors import CommError, StageError


def _waiting_for(text: str):  # type: ignore[no-untyped-def]
    return lambda: text


def _connect(group: LocalGroup) -> AbstractComm:
    """Connect with all channels open."""
    comm = group.connect()
    comm.open(both_ways(itertools.combinations(range(group.num_ranks), 2)))
    return comm


def test_results_come_in_the_order_of_the_ranks() -> None:
    assert [0, 10, 20, 30] == local_ranks(4, lambda group, ten: group.rank * ten, 10)


def test_groups_know_their_rank_and_their_number() -> None:
    def main(group: LocalGroup) -> tuple[int, int, str]:
        return group.rank, group.num_ranks, repr(group)

    expected = [(0, 2, "LocalGroup(rank 0 of 2)"), (1, 2, "LocalGroup(rank 1 of 2)")]
    assert expected == local_ranks(2, main)


@pytest.mark.parametrize("num_ranks", [0, -1, 1.5, "2", None])
def test_a_number_of_ranks_that_cannot_be_is_rejected(num_ranks: object) -> None:
    expected = f"num_ranks is {num_ranks!r}. Expected a whole number, at least 1."
    with pytest.raises(StageError, match=f"^{re.escape(expected)}$"):
        local_ranks(num_ranks, lambda group: None)  # type: ignore[arg-type]


def _pass_around(group: LocalGroup, seen: list[tuple[int, int]]) -> list[float]:
    """Three times around the ring, and a gather in between."""
    comm = _connect(group)
    received = []
    for turn in range(3):
        seen.append((group.rank, turn))
        comm.send(torch.tensor([float(10 * turn + group.rank)]), (group.rank + 1) % group.num_ranks)
        buffer = torch.empty(1)
        sender = (group.rank - 1) % group.num_ranks
        comm.recv(buffer, sender).wait(_waiting_for("the ring"))
        received.append(buffer.item())
        if turn == 1:
            comm.gather(group.rank)
    return received


def test_ranks_take_turns_in_the_same_order_every_time() -> None:
    runs = []
    for _ in range(3):
        seen: list[tuple[int, int]] = []
        assert [[2, 12, 22], [0, 10, 20], [1, 11, 21]] == local_ranks(3, _pass_around, seen)
        runs.append(seen)
    assert runs[0] == runs[1] == runs[2]
    # A rank goes on until it has to wait; then the next one that can go on does.
    assert [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (0, 1)] == runs[0][:6]


def test_one_rank_runs_at_a_time() -> None:
    running: list[int] = []

    def main(group: LocalGroup) -> None:
        comm = _connect(group)
        for _ in range(20):
            running.append(group.rank)
            assert [group.rank] == running
            running.remove(group.rank)
            comm.gather(None)

    local_ranks(4, main)


def test_no_thread_outlives_the_ranks() -> None:
    before = threading.active_count()
    local_ranks(4, lambda group: group.connect().gather(1))
    with pytest.raises(ZeroDivisionError):
        local_ranks(4, lambda group: 1 // (group.rank - 2) and group.connect().gather(1))
    assert before == threading.active_count()


def test_messages_of_a_channel_stay_in_order_whether_sent_or_posted_first() -> None:
    def main(group: LocalGroup) -> list[float]:
        comm = _connect(group)
        if group.rank == 0:
            for number in range(3):  # Nothing is posted yet.
                comm.send(torch.tensor([float(number)]), 1)
            comm.gather(None)
            comm.gather(None)  # Rank 1 has posted more than there is.
            for number in range(3, 6):
                comm.send(torch.tensor([float(number)]), 1)
            return []
        comm.gather(None)
        buffers = [torch.empty(1) for _ in range(6)]
        posted = [comm.recv(buffer, 0) for buffer in buffers]
        comm.gather(None)
        for transfer in reversed(posted):
            transfer.wait(_waiting_for("a number"))
        return [buffer.item() for buffer in buffers]

    assert [0, 1, 2, 3, 4, 5] == local_ranks(2, main)[1]


def test_channels_do_not_wait_for_each_other() -> None:
    def main(group: LocalGroup) -> list[float]:
        comm = _connect(group)
        if group.rank < 2:
            comm.send(torch.tensor([float(group.rank)]), 2)
            return []
        buffers = [torch.empty(1), torch.empty(1)]
        posted = [comm.recv(buffers[0], 0), comm.recv(buffers[1], 1)]
        posted[1].wait(_waiting_for("rank 1"))
        posted[0].wait(_waiting_for("rank 0"))
        return [buffer.item() for buffer in buffers]

    assert [0, 1] == local_ranks(3, main)[2]


@pytest.mark.fuzz
@examples(40, long=2000)
@given(
    scripts=st.lists(st.lists(st.integers(1, 2), max_size=8), min_size=3, max_size=3),
    ahead=st.integers(0, 4),
)
def test_random_traffic_arrives_in_order(scripts: list[list[int]], ahead: int) -> None:
    """Each rank sends so many ranks on, by its script, then takes what comes, posting `ahead`."""

    def main(group: LocalGroup) -> bool:
        comm = _connect(group)
        for number, distance in enumerate(scripts[group.rank]):
            comm.send(torch.tensor([float(number)]), (group.rank + distance) % 3)
        for sender in {0, 1, 2} - {group.rank}:
            distance = (group.rank - sender) % 3
            expected = [number for number, by in enumerate(scripts[sender]) if by == distance]
            buffers = [torch.empty(1) for _ in expected]
            posted = []
            for place in range(len(expected)):
                while len(posted) < min(len(expected), place + 1 + ahead):
                    posted.append(comm.recv(buffers[len(posted)], sender))
                posted[place].wait(_waiting_for("traffic"))
            assert expected == [buffer.item() for buffer in buffers]
        return True

    assert [True] * 3 == local_ranks(3, main)


def test_a_message_is_as_it_was_when_it_was_received() -> None:
    """A receiver may change what it got: the sender's tensor is another one."""

    def main(group: LocalGroup) -> list[float]:
        comm = _connect(group)
        tensor = torch.ones(2)
        if group.rank == 0:
            comm.send(tensor, 1)
            comm.gather(None)
            return tensor.tolist()
        comm.recv(tensor, 0).wait(_waiting_for("ones"))
        tensor.mul_(5)
        comm.gather(None)
        return tensor.tolist()

    assert [[1, 1], [5, 5]] == local_ranks(2, main)


def test_gather_gives_every_value_to_every_rank_again_and_again() -> None:
    def main(group: LocalGroup) -> list[list[int]]:
        comm = _connect(group)
        return [comm.gather(group.rank * factor) for factor in (1, 10, 100)]

    expected = [[0, 1, 2], [0, 10, 20], [0, 100, 200]]
    assert [expected] * 3 == local_ranks(3, main)


def test_gathers_of_a_second_connection_are_its_own() -> None:
    """Two pipelines on the same ranks took the values of the first for those of the second."""

    def main(group: LocalGroup) -> list[list[str]]:
        return [group.connect().gather(f"{name}{group.rank}") for name in "ab"]

    assert [[["a0", "a1"], ["b0", "b1"]]] * 2 == local_ranks(2, main)


class _Own(Exception):
    """An exception that nobody else raises."""


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_exception_is_raised_as_it_is_and_the_other_ranks_are_told(culprit: int) -> None:
    raised = _Own("mine")
    told: dict[int, str] = {}

    def main(group: LocalGroup) -> None:
        comm = _connect(group)
        comm.gather(None)
        if group.rank == culprit:
            raise raised
        try:
            comm.recv(torch.empty(1), culprit).wait(_waiting_for("a word"))
        except CommError as error:
            told[group.rank] = str(error)
            raise

    with pytest.raises(_Own) as caught:
        local_ranks(3, main)
    assert raised is caught.value
    assert told == {
        rank: f"rank {rank} stopped waiting for a word, because rank {culprit} failed: _Own: mine"
        for rank in range(3)
        if rank != culprit
    }


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_all_ranks(kind: type[BaseException]) -> None:
    def main(group: LocalGroup) -> None:
        comm = _connect(group)
        if group.rank == 1:
            raise kind
        comm.gather(None)

    with pytest.raises(kind):
        local_ranks(3, main)


def test_the_first_failure_is_the_one_that_is_told() -> None:
    def main(group: LocalGroup) -> None:
        comm = _connect(group)
        comm.gather(None)
        if group.rank < 2:
            comm.fail(f"trouble {group.rank}")
        other = 1 if group.rank == 0 else 0
        comm.recv(torch.empty(1), other).wait(_waiting_for("peace"))

    with pytest.raises(CommError, match=r"because rank 0 failed: trouble 0$"):
        local_ranks(3, main)


def test_a_rank_that_gave_up_can_still_end_well() -> None:
    """What a rank reports reaches those who wait, not itself."""

    def main(group: LocalGroup) -> str:
        comm = _connect(group)
        if group.rank == 0:
            comm.fail("I give up")
            return "ended"
        try:
            comm.recv(torch.empty(1), 0).wait(_waiting_for("rank 0"))
        except CommError as error:
            return str(error)
        return "waited"

    told = "rank 1 stopped waiting for rank 0, because rank 0 failed: I give up"
    assert ["ended", told] == local_ranks(2, main)


def test_a_deadlock_is_told_at_once_with_what_each_rank_waits_for() -> None:
    told: list[str] = []

    def main(group: LocalGroup) -> None:
        other = 1 - group.rank
        comm = _connect(group)
        try:
            comm.recv(torch.empty(1), other).wait(_waiting_for(f"word of rank {other}"))
        except CommError as error:
            told.append(str(error))
            raise

    with pytest.raises(CommError):
        local_ranks(2, main)
    every = "rank 0 waits for word of rank 1; rank 1 waits for word of rank 0"
    assert 2 == len(told)
    assert all(f"no rank can go on: {every}" in text for text in told)


def test_waiting_for_a_rank_that_has_ended_is_told_at_once() -> None:
    def main(group: LocalGroup) -> None:
        if group.rank == 1:
            group.connect().gather(None)

    waits = "no rank can go on: rank 1 waits for all ranks to begin a first step"
    with pytest.raises(CommError, match=waits):
        local_ranks(2, main)


def test_a_deadlock_is_not_blamed_on_one_rank() -> None:
    def main(group: LocalGroup) -> None:
        if group.rank == 1:
            group.connect().gather(None)

    with pytest.raises(CommError) as caught:
        local_ranks(2, main)
    assert "rank 1 failed" not in str(caught.value)


def test_a_wait_that_is_over_does_not_fail_after_the_sender_did() -> None:
    """What was sent before the failure has arrived."""

    def main(group: LocalGroup) -> float:
        comm = _connect(group)
        if group.rank == 0:
            comm.send(torch.tensor([7.0]), 1)
            raise _Own
        buffer = torch.empty(1)
        comm.recv(buffer, 0).wait(_waiting_for("seven"))
        received.append(buffer.item())
        return buffer.item()

    received: list[float] = []
    with pytest.raises(_Own):
        local_ranks(2, main)
    assert [7.0] == received


def test_sender_may_change_its_tensor_once_it_has_sent_it() -> None:
    def main(group: LocalGroup) -> float:
        comm = _connect(group)
        tensor = torch.ones(1)
        if group.rank == 0:
            comm.send(tensor, 1).wait(_waiting_for("nothing"))
            tensor.zero_()  # Rank 1 has not run yet.
        else:
            comm.recv(tensor.zero_(), 0).wait(_waiting_for("the tensor"))
        return tensor.item()

    assert [0.0, 1.0] == local_ranks(2, main)


@pytest.mark.parametrize(("call", "sender"), [("send", 0), ("recv", 1)])
def test_channel_that_was_not_opened_is_refused(call: str, sender: int) -> None:
    def main(group: LocalGroup) -> None:
        comm = group.connect()
        if group.rank == 0:
            getattr(comm, call)(torch.ones(1), 1)

    expected = f"the channel from rank {sender} to rank {1 - sender} is not open"
    with pytest.raises(CommError, match=expected):
        local_ranks(2, main)

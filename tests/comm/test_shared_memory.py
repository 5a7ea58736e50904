"""A link by shared memory: both of its ends in this process, each driven in turn."""

import os
import platform
import resource
import socket
import threading
import time
from weakref import WeakSet

import pytest
import torch

from fuzzing import rotated
from limits import HANG_S
from penstock.comm import shared_memory
from penstock.comm.shared_memory import Listener, SharedMemoryLink, connect

Ends = tuple[SharedMemoryLink, SharedMemoryLink]


def make_ends(*backlogged: WeakSet[SharedMemoryLink]) -> Ends:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return SharedMemoryLink(left, backlogged[0]), SharedMemoryLink(right, backlogged[1])


@pytest.fixture
def ends() -> Ends:
    return make_ends(WeakSet(), WeakSet())


def receive(link: SharedMemoryLink, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty_like(like)
    link.recv(tensor).wait(HANG_S)
    return tensor


@rotated(
    dtype=[torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool],
    shape=[(), (1,), (3, 4), (0, 4), (300, 300)],
)
def test_tensor_arrives_as_it_was(ends: Ends, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    sent = torch.randint(0, 2, shape).to(dtype)
    ends[0].send(sent)
    assert torch.equal(sent, receive(ends[1], sent))


def test_messages_fill_receives_in_order_whichever_is_waited_for_first(ends: Ends) -> None:
    buffers = [torch.empty(2) for _ in range(3)]
    works = [ends[1].recv(buffer) for buffer in buffers]
    for number in range(3):
        ends[0].send(torch.full((2,), float(number)))
    works[2].wait(HANG_S)
    assert [0.0, 1.0, 2.0] == [buffer[0].item() for buffer in buffers]
    works[0].wait(HANG_S)


def test_senders_tensor_is_free_as_soon_as_it_is_sent(ends: Ends) -> None:
    tensor = torch.ones(4)
    ends[0].send(tensor).wait(HANG_S)
    tensor.zero_()
    assert torch.equal(torch.ones(4), receive(ends[1], tensor))


def test_slots_are_used_again_once_their_messages_are_taken(ends: Ends) -> None:
    tensor = torch.ones(5000)
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        for _ in range(4):
            ends[0].send(tensor)
        for _ in range(4):
            receive(ends[1], tensor)
    # Arenas of 1, 1 and 2 slots, each open at both ends, though twenty messages went through.
    assert open_files + 6 == len(os.listdir("/proc/self/fd"))


def test_many_messages_under_way_need_few_files(ends: Ends) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        ends[0].send(torch.ones(10))
    assert len(os.listdir("/proc/self/fd")) < open_files + 12


def test_larger_message_gets_a_slot_that_holds_it(ends: Ends) -> None:
    for size in (10, 100_000, 10, 50_000, 1_000_000):
        sent = torch.rand(size)
        ends[0].send(sent)
        assert torch.equal(sent, receive(ends[1], sent))


def test_slot_that_is_not_taken_yet_is_not_overwritten(ends: Ends) -> None:
    for number in range(20):
        ends[0].send(torch.full((1000,), float(number)))
    assert list(range(20)) == [receive(ends[1], torch.empty(1000))[7].item() for _ in range(20)]


def test_more_messages_than_the_socket_holds_do_not_make_the_sender_wait(ends: Ends) -> None:
    count = 2000
    for number in range(count):
        ends[0].send(torch.tensor([number]))
    like = torch.empty(1, dtype=torch.int64)
    received = []
    for _ in range(count):
        received.append(receive(ends[1], like).item())
        ends[0].flush()
    assert list(range(count)) == received


def test_sender_that_waits_gets_rid_of_what_the_socket_had_no_room_for(ends: Ends) -> None:
    count, like = 2000, torch.empty(1, dtype=torch.int64)
    received = []

    def answer_in_the_end() -> None:
        received.extend(receive(ends[1], like).item() for _ in range(count))
        ends[1].send(like.zero_())

    for number in range(count):
        ends[0].send(torch.tensor([number]))
    thread = threading.Thread(target=answer_in_the_end)
    thread.start()
    receive(ends[0], like)
    thread.join(HANG_S)
    assert list(range(count)) == received


def test_who_waits_for_one_process_sends_what_another_had_no_room_for() -> None:
    """Three ranks: 0 waits for 2, which waits for 1, which waits for all that 0 has sent."""
    backlogged = [WeakSet[SharedMemoryLink]() for _ in range(3)]
    zero_to_one, one_to_zero = make_ends(backlogged[0], backlogged[1])
    zero_to_two, two_to_zero = make_ends(backlogged[0], backlogged[2])
    count, like = 2000, torch.empty(1, dtype=torch.int64)

    def run_one() -> None:
        for _ in range(count):
            receive(one_to_zero, like)
        two_to_zero.send(like.zero_())

    for number in range(count):
        zero_to_one.send(torch.tensor([number]))
    assert [zero_to_one] == list(backlogged[0])
    thread = threading.Thread(target=run_one)
    thread.start()
    receive(zero_to_two, like)
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_links_without_a_backlog_take_no_time_while_others_wait() -> None:
    """Each wait went through the links to all ranks of the machine."""
    backlogged = WeakSet[SharedMemoryLink]()
    ends = [make_ends(backlogged, WeakSet()) for _ in range(3)]
    for here, there in ends:
        here.send(torch.ones(3))
        there.send(torch.ones(3))
        receive(here, torch.ones(3))
        with pytest.raises(TimeoutError):
            here.recv(torch.ones(3)).wait(0.01)
    assert [] == list(backlogged)


def test_arenas_stay_small_though_each_message_is_larger_than_all_before(ends: Ends) -> None:
    """The number of slots doubled with each record size: terabytes after some twenty of them."""
    before = torch.zeros(0)
    for pages in range(1, 120):
        before = torch.ones(pages * 1024)  # A page is 4 KiB.
        ends[0].send(before)
        receive(ends[1], before)
    arenas = ends[0]._outgoing.arenas
    assert len(arenas) <= 8
    assert sum(len(arena.memory) for arena in arenas) < 4 * before.nbytes


def test_wait_for_a_send_ends_when_the_socket_has_taken_it(ends: Ends) -> None:
    """A rank that had nothing to wait for left a step with packets that nobody would send."""
    count, like = 1000, torch.empty(1, dtype=torch.int64)
    works = [ends[0].send(torch.tensor([number])) for number in range(count)]
    assert ends[0].num_flushed() < count
    received = []
    thread = threading.Thread(
        target=lambda: received.extend(receive(ends[1], like).item() for _ in range(count))
    )
    thread.start()
    works[-1].wait(HANG_S)
    assert count == ends[0].num_flushed()
    thread.join(HANG_S)
    assert list(range(count)) == received


def test_wait_for_a_send_that_nobody_takes_ends_in_time(ends: Ends) -> None:
    works = [ends[0].send(torch.ones(1)) for _ in range(1000)]
    with pytest.raises(TimeoutError):
        works[-1].wait(0.05)


def test_close_reaches_the_other_end_though_a_forked_process_has_a_copy(ends: Ends) -> None:
    """A data loader's workers, say: the other end got no end of file, and waited its time out."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # Until the parent is done.
        os._exit(0)
    try:
        ends[0].close()
        with pytest.raises(ConnectionError):
            receive(ends[1], torch.empty(3))
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def test_closed_end_is_told_at_once_but_what_was_sent_still_arrives(ends: Ends) -> None:
    ends[0].send(torch.ones(3))
    ends[0].close()
    assert torch.equal(torch.ones(3), receive(ends[1], torch.empty(3)))
    with pytest.raises(ConnectionError, match="closed its end"):
        receive(ends[1], torch.empty(3))
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        ends[1].send(torch.ones(3))


def test_close_wakes_up_who_waits(ends: Ends) -> None:
    threading.Timer(0.1, ends[0].close).start()
    began_s = time.monotonic()
    with pytest.raises(ConnectionError):
        receive(ends[1], torch.empty(3))
    assert time.monotonic() - began_s < HANG_S


def test_message_that_does_not_come_in_time_is_told(ends: Ends) -> None:
    with pytest.raises(TimeoutError, match="no message was sent or received in time"):
        ends[1].recv(torch.empty(3)).wait(0.05)


def test_message_of_another_size_is_told(ends: Ends) -> None:
    ends[0].send(torch.ones(3))
    with pytest.raises(ConnectionError, match="a message of 12 bytes came where one of 16 was"):
        receive(ends[1], torch.empty(4))


def test_want_of_open_files_is_told(ends: Ends) -> None:
    """The kernel drops a file that the receiver has no room for; what names it cannot be read."""
    ends[0].send(torch.ones(3))
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, usual[1]))
    try:
        with pytest.raises(OSError, match="too many open files"):
            receive(ends[1], torch.empty(3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_listener_tells_ranks_apart() -> None:
    listener = Listener()
    links = {rank: connect(listener.name, rank, HANG_S) for rank in (3, 1)}
    accepted = dict(listener.accept(HANG_S) for _ in links)
    listener.close()
    for rank, connection in links.items():
        SharedMemoryLink(connection, WeakSet()).send(torch.tensor([rank]))
        link = SharedMemoryLink(accepted[rank], WeakSet())
        assert rank == receive(link, torch.empty(1, dtype=torch.int64)).item()


def test_listener_waits_no_longer_than_it_may() -> None:
    with pytest.raises(TimeoutError):
        Listener().accept(0.05)


def test_listener_refuses_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    stranger = connect(listener.name, 1, HANG_S)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(TimeoutError):
        listener.accept(0.05)
    with stranger, pytest.raises(ConnectionResetError):  # What it said was not read.
        stranger.recv(1)


def test_process_of_another_user_is_not_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have taken the name of a process of ours that ended."""
    listener = Listener()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(PermissionError, match="another user's process listens under"):
        connect(listener.name, 1, HANG_S)


@pytest.mark.parametrize("processor", ["aarch64", "arm64", "ppc64le", "riscv64", "i686", ""])
def test_processor_that_may_reorder_memory_uses_no_shared_memory(
    processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of messages taken could be seen before the message had been read."""
    monkeypatch.setattr(platform, "machine", lambda: processor)
    assert "" == shared_memory.find_machine()


@pytest.mark.parametrize("processor", ["x86_64", "AMD64"])
def test_processor_that_keeps_the_order_uses_shared_memory(
    processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: processor)
    assert shared_memory.find_machine()
    assert shared_memory.find_machine() == shared_memory.find_machine()

"""A link between two processes of one machine, without a thread that receives.

A message is copied into a *slot*, a piece of memory that both processes map, and announced by a
packet on a socket. While the receiver computes, the packet stays in the socket and nothing wakes
up. A thread that waits for packets would interrupt the computation for every message. A receiver
that waits sleeps on the socket.

    sender                      socket                 receiver
    copy into a free slot ────▶ where, how much ─────▶ copy out of it
    use its slot again ◀─────── in shared memory ───── count the message as taken

Slots are in *arenas*, files in memory; a new arena is sent with the first packet that names it.
Each new arena has as many slots as are already in use. So there are few arenas, however many
messages are in flight, and at most twice the memory that the messages need.

Memory order: a message is announced by a system call, which orders what was written before it. The
count of messages taken is a plain store after the copy, with no barrier. On x86-64 no store
overtakes an earlier load, so a sender that sees the count may overwrite the slot. Other processors,
such as ARM, do not guarantee this order; there `find_machine` returns "", and gloo is used.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import select
import socket
import struct
import time
import weakref
from collections import deque
from typing import NamedTuple

from torch import Tensor

from penstock.comm.abstract_comm import AbstractLink, Work
from penstock.ir.message import Channel

_PACKET = struct.Struct("=qqq")
_NUMBER = struct.Struct("=q")
_HEAD_BYTES = mmap.PAGESIZE
"""The size of an arena's head; the first arena's head holds the number of messages taken."""
_LONGEST_SLEEP_S = 3600.0
_ORDERED_PROCESSORS = ("x86_64", "amd64")
"""Values of `platform.machine()`, in lower case, where no store overtakes an earlier load."""


class _Packet(NamedTuple):
    arena: int
    offset: int
    num_bytes: int


class _Slot(NamedTuple):
    arena: int
    offset: int
    capacity: int


class SharedMemoryLink(AbstractLink):
    """One end of a connection to another process; `connection` is a SEQPACKET socket.

    While waiting, a link also sends packets that other links' sockets had no room for: another rank
    may be waiting for them. The links of a process share `backlogged`, the set of those links, so
    that the others, to ranks that this one has no messages for, take no time.
    """

    copies = True

    def __init__(
        self, connection: socket.socket, backlogged: "weakref.WeakSet[SharedMemoryLink]"
    ) -> None:
        connection.setblocking(False)
        self._backlogged = backlogged
        self._socket = connection
        self._outgoing = _Outgoing()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._arenas: list[_Arena] = []
        self._num_taken = 0
        self._posted: deque[_Posted] = deque()

    def connect(self, channel: Channel, timeout_s: float) -> None:
        """Do nothing: the socket already carries both channels."""

    def send(self, tensor: Tensor) -> Work:
        num_bytes = tensor.nbytes
        slot, files = self._outgoing.take_slot(num_bytes)
        address = self._outgoing.arenas[slot.arena].address + slot.offset
        # Not with torch, which takes ten times as long when nothing else is in the cache.
        ctypes.memmove(address, tensor.data_ptr(), num_bytes)
        self._unsent.append((_PACKET.pack(slot.arena, slot.offset, num_bytes), files))
        self.flush()
        return _Sent(self, self._outgoing.num_sent)

    def recv(self, tensor: Tensor) -> Work:
        self._posted.append(_Posted(self, tensor))
        return self._posted[-1]

    def close(self) -> None:
        """Shut the socket down: a waiting process notices at once, even if a fork has a copy."""
        self.interrupt()
        self._release()

    def interrupt(self) -> None:
        """Shut the socket down, and leave it open: its number must not be used again by others."""
        with contextlib.suppress(OSError):  # It may already be closed, here or at the other end.
            self._socket.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self._release()

    def _release(self) -> None:
        self._socket.close()
        for _, files in self._unsent:
            _close_all(files)
        self._unsent.clear()

    def num_flushed(self) -> int:
        """Return the number of messages that the socket has taken."""
        return self._outgoing.num_sent - len(self._unsent)

    def flush(self) -> None:
        """Send packets that the socket had no room for; it holds a few hundred."""
        while self._unsent:
            packet, files = self._unsent[0]
            try:
                if files:
                    socket.send_fds(self._socket, [packet], files)
                else:
                    self._socket.send(packet)
            except BlockingIOError:
                self._backlogged.add(self)
                return
            self._unsent.popleft()
            _close_all(files)

    def fill_next(self, deadline_s: float) -> None:
        """Wait for the next message, and fill the receive that was posted first."""
        packet, files = self._next_packet(deadline_s)
        self._arenas += map(_Arena, files)
        _close_all(files)
        posted = self._posted.popleft()
        tensor = posted.tensor
        if packet.num_bytes != tensor.nbytes:
            raise ConnectionError(
                f"a message of {packet.num_bytes} bytes came where one of "
                f"{tensor.nbytes} was expected"
            )
        address = self._arenas[packet.arena].address + packet.offset
        ctypes.memmove(tensor.data_ptr(), address, packet.num_bytes)
        self._num_taken += 1
        _NUMBER.pack_into(self._arenas[0].memory, 0, self._num_taken)
        posted.is_filled = True

    def _next_packet(self, deadline_s: float) -> tuple[_Packet, list[int]]:
        while True:
            try:
                data, files, flags, _ = socket.recv_fds(self._socket, _PACKET.size, 1)
            except BlockingIOError:
                self.sleep(deadline_s, select.POLLIN)
                continue
            if not data:
                raise ConnectionError("the other process closed its end")
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "too many open files to receive another one")
            return _Packet(*_PACKET.unpack(data)), files

    def sleep(self, deadline_s: float, events: int) -> None:
        """Sleep until one of the events happens here, or a backlogged link can send again."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no message was sent or received in time")
        poll = select.poll()
        poll.register(self._socket, events)
        for link in list(self._backlogged):
            link.flush()
            if not link._unsent:
                self._backlogged.discard(link)
            else:
                poll.register(link._socket, select.POLLOUT | (events if link is self else 0))
        poll.poll(min(left_s, _LONGEST_SLEEP_S) * 1000)


class _Outgoing:
    """The slots for sending. Messages are taken in order, so slots become free in order."""

    def __init__(self) -> None:
        self.arenas: list[_Arena] = []
        self._free: list[_Slot] = []
        self._in_use: deque[tuple[int, _Slot]] = deque()
        self.num_sent = 0

    def take_slot(self, num_bytes: int) -> tuple[_Slot, list[int]]:
        """Return a slot for `num_bytes`, and the file of its arena if that is new."""
        files = []
        slot = self._find(num_bytes)
        if slot is None:
            files.append(self._add_arena(num_bytes))
            slot = self._free[-1]
        self._free.remove(slot)
        self.num_sent += 1
        self._in_use.append((self.num_sent, slot))
        return slot, files

    def _find(self, num_bytes: int) -> _Slot | None:
        """Return the smallest free slot that fits; of several, the last used (it is cached)."""
        if self.arenas:
            (num_taken,) = _NUMBER.unpack_from(self.arenas[0].memory)
            while self._in_use and self._in_use[0][0] <= num_taken:
                self._free.append(self._in_use.popleft()[1])
        fitting = (slot for slot in reversed(self._free) if slot.capacity >= num_bytes)
        return min(fitting, key=lambda slot: slot.capacity, default=None)

    def _add_arena(self, num_bytes: int) -> int:
        """Add as many slots as are in use for this size, and return the file of the new arena.

        Sizes are powers of two, so there are few of them.
        """
        pages = max(-(-num_bytes // mmap.PAGESIZE), 1)
        capacity = (1 << (pages - 1).bit_length()) * mmap.PAGESIZE
        num_slots = max(sum(slot.capacity >= num_bytes for _, slot in self._in_use), 1)
        file = os.memfd_create("penstock")
        os.ftruncate(file, _HEAD_BYTES + num_slots * capacity)
        number = len(self.arenas)
        self.arenas.append(_Arena(file))
        for slot in range(num_slots):
            self._free.append(_Slot(number, _HEAD_BYTES + slot * capacity, capacity))
        return file


class _Arena:
    """A file in memory, mapped into this process."""

    def __init__(self, file: int) -> None:
        self.memory = mmap.mmap(file, os.fstat(file).st_size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def _close_all(files: list[int]) -> None:
    for file in files:
        os.close(file)


class _Posted:
    """A posted receive; messages fill the receives of a link in order."""

    __slots__ = ("_link", "is_filled", "tensor")

    def __init__(self, link: SharedMemoryLink, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_filled = False
        self._link = weakref.proxy(link)  # The link refers to it, and must end with its last user.

    def wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.is_filled:
            self._link.fill_next(deadline_s)


class _Sent:
    """A message that has been copied; done when the socket has taken its packet."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: SharedMemoryLink, number: int) -> None:
        self._link = weakref.proxy(link)
        self._number = number

    def wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self._link.num_flushed() < self._number:
            self._link.sleep(deadline_s, select.POLLOUT)


class Listener:
    """The socket at which other processes of this machine reach this one."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("")  # Linux picks a free name, which ends with the socket.
        self._socket.listen()
        self.name: bytes = self._socket.getsockname()

    def accept(self, timeout_s: float) -> tuple[int, socket.socket]:
        """Return the rank and the socket of the next process of this user that connects."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            connection, _ = self._socket.accept()
            connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            said = connection.recv(_NUMBER.size) if _is_of_this_user(connection) else b""
            if len(said) == _NUMBER.size:
                return _NUMBER.unpack(said)[0], connection
            connection.close()

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:
        self.close()


def connect(name: bytes, rank: int, timeout_s: float) -> socket.socket:
    """Connect to the process that listens under `name`, and send it this process's rank."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    connection.connect(name)
    if not _is_of_this_user(connection):  # The process that listened there may have ended.
        connection.close()
        raise PermissionError(errno.EPERM, f"another user's process listens under {name!r}")
    connection.send(_NUMBER.pack(rank))
    return connection


def _is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is of the user of this one."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


def find_machine() -> str:
    """Return an id shared by processes that can reach each other this way; empty if none can.

    It is empty on processors that may let a store overtake an earlier load, for the reason given
    at the top of this file.
    """
    if platform.machine().lower() not in _ORDERED_PROCESSORS or not hasattr(os, "memfd_create"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"
    except OSError:
        return ""

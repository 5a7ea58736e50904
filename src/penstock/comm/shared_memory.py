"""A link between two processes of one machine, without a thread that receives.

A message is copied into a *slot*, a piece of memory that both processes map, and announced by a
packet on a socket. While the receiver computes, the packet just lies there: nothing wakes up,
where a thread that waits for packets would take the processor away from the computation for
every message. A receiver that waits sleeps on the socket.

    sender                      socket                    receiver
    copy into a free slot ────▶ (slot, size, number) ───▶ copy out of it
    may use the slot again ◀─── by shared memory ──────── write the number into it

A new slot's file comes with the first packet that names it.
"""

import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.comm.base import Link, Work

_PACKET = struct.Struct("=qqq")
_NUMBER = struct.Struct("=q")
_HEAD_BYTES = 64
"""At the head of a slot: the number of the last message that was taken out of it."""


class _Packet(NamedTuple):
    slot: int
    num_bytes: int
    number: int


class SharedMemoryLink(Link):
    """One end of a connection to another process; `connection` is a SEQPACKET socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._out: list[_Slot] = []
        self._in: dict[int, _Slot] = {}
        self._num_sent = 0
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._posted: deque[_Posted] = deque()

    def send(self, tensor: Tensor) -> Work:
        num_bytes = tensor.numel() * tensor.itemsize
        slot, is_new = self._free_slot(num_bytes)
        slot.put(tensor)
        self._num_sent += 1
        slot.last_number = self._num_sent
        packet = _PACKET.pack(slot.index, num_bytes, self._num_sent)
        self._unsent.append((packet, [slot.file] if is_new else []))
        self.flush()
        return _COPIED

    def recv(self, tensor: Tensor) -> Work:
        self._posted.append(_Posted(self, tensor))
        return self._posted[-1]

    def close(self) -> None:
        """The other end finds out at once, if it waits; what was sent can still be received."""
        self._socket.close()

    def __del__(self) -> None:
        self.close()

    def flush(self) -> None:
        """Send packets that the socket had no room for: it takes some hundred."""
        while self._unsent:
            packet, files = self._unsent[0]
            try:
                socket.send_fds(self._socket, [packet], files)
            except BlockingIOError:
                return
            self._unsent.popleft()

    def fill_next(self, deadline_s: float) -> None:
        """Wait for the next message, and fill the receive that was posted first."""
        packet, files = self._next_packet(deadline_s)
        if files:
            self._in[packet.slot] = _Slot(packet.slot, files[0])
        posted = self._posted.popleft()
        self._in[packet.slot].take(posted.tensor, packet)
        posted.is_filled = True

    def _next_packet(self, deadline_s: float) -> tuple[_Packet, list[int]]:
        while True:
            self.flush()
            try:
                data, files, _, _ = socket.recv_fds(self._socket, _PACKET.size, 1)
            except BlockingIOError:
                self._sleep(deadline_s)
                continue
            if not data:
                raise ConnectionError("the other process closed its end")
            return _Packet(*_PACKET.unpack(data)), files

    def _sleep(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no message came in time")
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        poll = select.poll()
        poll.register(self._socket, events)
        poll.poll(left_s * 1000)

    def _free_slot(self, num_bytes: int) -> tuple["_Slot", bool]:
        """A slot that holds so much and is not in use, and whether it is new."""
        for slot in self._out:
            if slot.capacity >= num_bytes and slot.number_taken() == slot.last_number:
                return slot, False
        pages = -(-(num_bytes + _HEAD_BYTES) // mmap.PAGESIZE)
        file = os.memfd_create("penstock")
        os.ftruncate(file, pages * mmap.PAGESIZE)
        self._out.append(_Slot(len(self._out), file))
        return self._out[-1], True


class _Slot:
    """Memory that two processes map; holds one message at a time."""

    def __init__(self, index: int, file: int) -> None:
        self.index = index
        self.file = file
        self.last_number = 0
        self._memory = mmap.mmap(file, os.fstat(file).st_size)
        self.capacity = len(self._memory) - _HEAD_BYTES

    def __del__(self) -> None:
        os.close(self.file)

    def number_taken(self) -> int:
        number: int
        (number,) = _NUMBER.unpack_from(self._memory)
        return number

    def put(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._as(tensor).copy_(tensor)

    def take(self, tensor: Tensor, packet: _Packet) -> None:
        if packet.num_bytes != tensor.numel() * tensor.itemsize:
            raise ConnectionError(
                f"a message of {packet.num_bytes} bytes came where one of "
                f"{tensor.numel() * tensor.itemsize} was expected"
            )
        if tensor.numel():
            tensor.copy_(self._as(tensor))
        _NUMBER.pack_into(self._memory, 0, packet.number)

    def _as(self, like: Tensor) -> Tensor:
        """The slot's memory as a tensor of this shape and type."""
        values = torch.frombuffer(
            self._memory, dtype=like.dtype, count=like.numel(), offset=_HEAD_BYTES
        )
        return values.view(like.shape)


class _Posted:
    """A receive; messages fill those of a link in order."""

    __slots__ = ("_link", "is_filled", "tensor")

    def __init__(self, link: SharedMemoryLink, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_filled = False
        self._link = weakref.proxy(link)  # Which has it in turn, and must end with its last user.

    def wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.is_filled:
            self._link.fill_next(deadline_s)


class _Copied:
    def wait(self, timeout_s: float) -> None:
        """The message has been copied, so the sender's tensor is free."""


_COPIED = _Copied()


class Listener:
    """Where other processes of this machine reach this one."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("")  # Linux picks a free name; it is gone with the socket.
        self._socket.listen()
        self.name: bytes = self._socket.getsockname()

    def accept(self, timeout_s: float) -> tuple[int, SharedMemoryLink]:
        """The next process of this user that connects: the rank that it says, and the link."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            connection, _ = self._socket.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, user, _ = struct.unpack("3i", credentials)
            if user == os.getuid():
                connection.settimeout(timeout_s)
                (rank,) = _NUMBER.unpack(connection.recv(_NUMBER.size))
                return rank, SharedMemoryLink(connection)
            connection.close()

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:
        self.close()


def connect(name: bytes, rank: int, timeout_s: float) -> SharedMemoryLink:
    """A link to the process that listens under `name`; tells it this process's rank."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    connection.connect(name)
    connection.send(_NUMBER.pack(rank))
    return SharedMemoryLink(connection)


def find_machine() -> str:
    """What processes have in common that can reach each other this way; empty if none can."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""

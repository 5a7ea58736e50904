"""Times of messages between real ranks: the messages of a step, sent there and back."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.comm import AbstractComm, Transfer
from penstock.comm.decisions import recv_value, send_value
from penstock.costs import EdgeCost
from penstock.ir import Message, Placement, Rank
from penstock.runtime.measuring.action_times import now_s
from penstock.runtime.messages.forms import Form

_NUM_PINGS = 9
# A rank that waits in a step has slept for a while, and takes longer to wake up than one that has
# only just fallen asleep.
_PAUSE_S = 2e-3


class Edge(NamedTuple):
    """The times of messages between two neighbouring stages, averaged over both directions."""

    cost: EdgeCost
    """Its delay: seconds from sending to arrival, without the receiver's own work."""
    receipt_s: float
    """The time to take a message that has already arrived."""


def measure_edges(
    comm: AbstractComm, device: torch.device, placement: Placement, forms: Mapping[Message, Form]
) -> dict[int, Edge]:
    """Measure the edges that this rank has an end of; all ranks must call it.

    `forms` has the form of the first microbatch's activation on each such edge between ranks.
    """
    edges = {}
    for edge, ends in enumerate(zip(placement.ranks, placement.ranks[1:], strict=False)):
        if comm.rank not in ends:
            continue
        sender, receiver = ends
        if sender == receiver:
            edges[edge] = Edge(EdgeCost(0.0, 0), 0.0)
            continue
        tensors = [form.empty(device) for form in forms[Message(edge, edge + 1, 0)].tensors]
        ping = _Ping(comm, device, tensors, sender if comm.rank == receiver else receiver)
        edges[edge] = ping.measure(is_first=comm.rank == sender)
    return edges


@dataclass(frozen=True, slots=True)
class _Ping:
    """One rank's end of an edge that is being measured."""

    comm: AbstractComm
    device: torch.device
    tensors: Sequence[Tensor]
    other: Rank

    def measure(self, *, is_first: bool) -> Edge:
        """Measure the edge: the first end sends, the other answers, and both get the result."""
        what = "the time of a message"
        if not is_first:
            began_s = now_s(self.device)
            for _ in range(_NUM_PINGS):
                self._receive()
                self._send()
            took_s = now_s(self.device) - began_s
            posted = [self._post() for _ in range(_NUM_PINGS)]
            # As many went there and back in this time, so all arrive before they are awaited.
            time.sleep(max(took_s, _PAUSE_S))
            receipt_s = statistics.median(map(self._take, posted))
            send_value(self.comm, self.device, self.other, receipt_s, what)
            edge: Edge = recv_value(self.comm, self.device, self.other, what)
            return edge
        pairs = [self._ping() for _ in range(_NUM_PINGS)]
        ahead = [self._start_sending() for _ in range(_NUM_PINGS)]
        for transfers in ahead:
            self._finish_sending(transfers)
        receipt_s = recv_value(self.comm, self.device, self.other, what)
        round_trip_s, sending_s = map(statistics.median, zip(*pairs, strict=True))
        delay_s = max(0.0, round_trip_s / 2 - sending_s - receipt_s)
        num_bytes = sum(tensor.nbytes for tensor in self.tensors)
        edge = Edge(EdgeCost(delay_s, num_bytes), receipt_s)
        send_value(self.comm, self.device, self.other, edge, what)
        return edge

    def _ping(self) -> tuple[float, float]:
        """Return the times of a round trip, and of its first send."""
        time.sleep(_PAUSE_S)
        began_s = now_s(self.device)
        transfers = self._start_sending()
        sent_s = now_s(self.device)
        self._receive()
        ended_s = now_s(self.device)
        self._finish_sending(transfers)
        return ended_s - began_s, sent_s - began_s

    def _send(self) -> None:
        self._finish_sending(self._start_sending())

    def _start_sending(self) -> list[Transfer]:
        return [self.comm.send(tensor, self.other) for tensor in self.tensors]

    def _finish_sending(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            transfer.wait(lambda: f"rank {self.other} to take a message that is timed")

    def _receive(self) -> None:
        self._take(self._post())

    def _post(self) -> list[Transfer]:
        return [self.comm.recv(tensor, self.other) for tensor in self.tensors]

    def _take(self, transfers: list[Transfer]) -> float:
        """Wait for what was posted; return how long that took."""
        began_s = now_s(self.device)
        for transfer in transfers:
            transfer.wait(lambda: f"a message that is timed, from rank {self.other}")
        return now_s(self.device) - began_s

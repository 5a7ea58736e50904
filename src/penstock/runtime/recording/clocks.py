"""The difference between the clocks of two ranks, which may be on two machines."""

import time

import torch

from penstock.comm import AbstractComm
from penstock.comm.decisions import channels_of_rank_0
from penstock.ir import Rank

_NUM_ROUNDS = 15


def seconds_ahead(comm: AbstractComm, device: torch.device) -> float:
    """Return the seconds by which this rank's `time.perf_counter` is ahead of rank 0's.

    All ranks must call it. Rank 0 asks each rank for its time, several times. In the quickest
    round, it assumes that the answer was given in the middle. The error is at most half the time
    of that round.
    """
    comm.open(channels_of_rank_0(comm.num_ranks))
    if comm.rank == 0:
        for other in range(1, comm.num_ranks):
            _tell_ahead(comm, device, other)
        return 0.0
    for _ in range(_NUM_ROUNDS):
        _receive(comm, device, 0)
        _send(comm, device, 0, time.perf_counter())
    return _receive(comm, device, 0)


def _tell_ahead(comm: AbstractComm, device: torch.device, other: Rank) -> None:
    rounds = []
    for _ in range(_NUM_ROUNDS):
        began_s = time.perf_counter()
        _send(comm, device, other, began_s)
        theirs_s = _receive(comm, device, other)
        took_s = time.perf_counter() - began_s
        rounds.append((took_s, theirs_s - (began_s + took_s / 2)))
    _, ahead_s = min(rounds)
    _send(comm, device, other, ahead_s)


def _send(comm: AbstractComm, device: torch.device, other: Rank, time_s: float) -> None:
    message = torch.tensor([time_s], dtype=torch.float64, device=device)
    comm.send(message, other).wait(lambda: f"rank {other} to compare clocks for the recording")


def _receive(comm: AbstractComm, device: torch.device, other: Rank) -> float:
    message = torch.empty(1, dtype=torch.float64, device=device)
    comm.recv(message, other).wait(
        lambda: f"the clock of rank {other}, for the recording that all ranks gather"
    )
    return message.item()

"""How far the clocks of two ranks are apart, which may be on two machines."""

import time
from collections.abc import Callable

import torch

from penstock.comm import AbstractComm
from penstock.ir import Rank

_NUM_ROUNDS = 15


def seconds_ahead(
    comm: AbstractComm, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """By how much this rank's clock is ahead of rank 0's; all ranks must call it.

    Rank 0 asks each rank for its time, again and again. In the quickest round the answer was given
    in the middle of it, but for half of what the round took: that bounds the error.
    """
    if comm.rank == 0:
        for other in range(1, comm.num_ranks):
            _tell_ahead(comm, device, other, clock)
        return 0.0
    for _ in range(_NUM_ROUNDS):
        _receive(comm, device, 0)
        _send(comm, device, 0, clock())
    return _receive(comm, device, 0)


def _tell_ahead(
    comm: AbstractComm, device: torch.device, other: Rank, clock: Callable[[], float]
) -> None:
    rounds = []
    for _ in range(_NUM_ROUNDS):
        began_s = clock()
        _send(comm, device, other, began_s)
        theirs_s = _receive(comm, device, other)
        took_s = clock() - began_s
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

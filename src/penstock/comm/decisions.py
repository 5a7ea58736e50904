"""Decisions that rank 0 makes from the values of all ranks, over the pipeline's own channels.

On these channels, a rank that fails is noticed at once by all ranks that wait for it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from penstock.comm import AbstractComm
from penstock.comm.channels import both_ways
from penstock.comm.plain_values import of_bytes, to_bytes
from penstock.ir import Rank
from penstock.ir.message import Channel

Result = TypeVar("Result")


def decide(
    comm: AbstractComm,
    device: torch.device,
    value: Any,
    choose: Callable[[list[Any]], Result],
    what: str,
) -> Result:
    """Return what rank 0 chooses from the values of all ranks. All ranks must call it.

    `what` says what they wait for, in error messages.
    """
    comm.open(channels_of_rank_0(comm.num_ranks))
    others = range(1, comm.num_ranks)
    if comm.rank > 0:
        send_value(comm, device, 0, value, what)
        result: Result = recv_value(comm, device, 0, f"{what} by rank 0")
        return result
    found = [recv_value(comm, device, rank, f"{what}: the share of rank {rank}") for rank in others]
    chosen = choose([value, *found])
    for rank in others:
        send_value(comm, device, rank, chosen, what)
    return chosen


def channels_of_rank_0(num_ranks: int) -> set[Channel]:
    """Return the channels between rank 0 and each other rank."""
    return both_ways((0, rank) for rank in range(1, num_ranks))


def send_value(
    comm: AbstractComm, device: torch.device, receiver: Rank, value: Any, what: str
) -> None:
    """Send a value that `to_bytes` takes, and wait until it may be changed."""
    body = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8).to(device)
    size = torch.tensor([len(body)], device=device)
    transfers = [comm.send(tensor, receiver) for tensor in (size, body)]
    for transfer in transfers:
        transfer.wait(lambda: f"rank {receiver} to take {what}")


def recv_value(comm: AbstractComm, device: torch.device, sender: Rank, what: str) -> Any:
    """Wait for a value that `send_value` sends, and return it."""
    size = torch.empty(1, dtype=torch.int64, device=device)
    comm.recv(size, sender).wait(lambda: what)
    body = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    comm.recv(body, sender).wait(lambda: what)
    return of_bytes(body.cpu().numpy().tobytes())

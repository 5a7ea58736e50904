"""Collectives with a time limit: the results, and the errors of a group that does not answer."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from limits import HANG_S
from penstock.comm.timed_collectives import add_up_, all_gather
from penstock.errors import CommError
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

WORDS = {"what": "the sums", "expected": "all of them to add"}


def gather_and_add(world: dist.ProcessGroup) -> tuple[list[Tensor], Tensor]:
    own = torch.tensor([1.0 + dist.get_rank()])
    gathered = all_gather(own, world, HANG_S, **WORDS)
    add_up_(own, world, HANG_S, **WORDS)
    return gathered, own


def test_all_ranks_have_all_values_and_their_sum(pool: WorkerPool) -> None:
    for gathered, total in pool.run(2, gather_and_add):
        assert [1.0, 2.0] == [value.item() for value in gathered]
        assert 3.0 == total.item()


def add_alone(world: dist.ProcessGroup) -> list[str]:
    """A layout without collectives fails in the call itself, as lost connections may."""
    messages: list[str] = []
    if dist.get_rank() == 0:
        value = torch.ones(1)
        for tensor, timeout_s in ((value.to_mkldnn(), HANG_S), (value, 0.5)):
            try:
                add_up_(tensor, world, timeout_s, **WORDS)
            except CommError as error:
                messages.append(str(error))
    return messages


def test_collective_that_fails_at_once_or_in_time_is_an_error_of_ours(pool: WorkerPool) -> None:
    messages, _ = pool.run(2, add_alone)
    pool.kill()  # gloo has closed the connections of the group.
    for message, limit in zip(messages, ("120", "0.5"), strict=True):
        assert message.startswith(
            f"rank 0 timed out or failed (limit {limit} s) waiting with ranks [0, 1] for the sums: "
        )
        assert message.endswith(". Expected all of them to add. Look at the first error of each.")
    assert "Mkldnn" in messages[0]

"""Collectives over a group of ranks that end in an error when their time is over.

The group has a timeout of its own, which is often longer than that of the pipeline.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import CommError


def all_gather(
    tensor: Tensor, group: dist.ProcessGroup, timeout_s: float, *, what: str, expected: str
) -> list[Tensor]:
    """Return the tensors of all ranks of a group, which must have the same shape.

    `what` says what the ranks wait for, and `expected` what each of them must do, for errors.
    """
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    _finish(
        lambda: dist.all_gather(found, tensor, group=group, async_op=True),
        group,
        timeout_s,
        what,
        expected,
    )
    return found


def add_up_(
    tensor: Tensor, group: dist.ProcessGroup, timeout_s: float, *, what: str, expected: str
) -> None:
    """Put the sum over all ranks of a group into a tensor; see `all_gather` for the arguments."""
    _finish(
        lambda: dist.all_reduce(tensor, group=group, async_op=True),
        group,
        timeout_s,
        what,
        expected,
    )


def _finish(
    start: Callable[[], dist.Work | None],
    group: dist.ProcessGroup,
    timeout_s: float,
    what: str,
    expected: str,
) -> None:
    """Start a collective and wait for it; a lost connection may fail already at the start."""
    try:
        work = start()
        assert work is not None
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise CommError(
            f"rank {dist.get_rank()} timed out or failed (limit {timeout_s:g} s) waiting with "
            f"ranks {dist.get_process_group_ranks(group)} for {what}: {reason}. Expected "
            f"{expected}. Look at the first error of each."
        ) from exc

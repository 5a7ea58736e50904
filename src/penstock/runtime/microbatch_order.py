"""The order in which the microbatches of a step run, if they take different work.

A long microbatch at the beginning delays the first forward of every rank after the first, and one
at the end delays the last backward of every rank before the last. So the shortest ones run first
and last, and the longest in the middle:

    work    3 1 4 2 5    runs    1 3 5 4 2

If ranks hold several stages in a loop, all microbatches come round before the first backward, so
only the end of the longest matters: they run from the shortest to the longest.
"""

import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from penstock.comm import AbstractComm, Transfer
from penstock.costs.plain_numbers import to_lists
from penstock.errors import AgreementError, StageError, StepError
from penstock.ir import Placement, Rank
from penstock.runtime.step_settings import Batch

_WHAT = "the work of the microbatches"


def check_work(work: Any, num_microbatches: int) -> list[float]:
    """Return the work of each microbatch as numbers."""
    values = to_lists(work)
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise StepError(
            f"work is {values!r}. Expected a number for each of the {num_microbatches} "
            "microbatches, the same on every rank, as the pipeline has by_work=True."
        )
    if len(values) != num_microbatches:
        raise StepError(
            f"work has {len(values)} values. Expected one for each of the {num_microbatches} "
            "microbatches."
        )
    for mb, value in enumerate(values):
        if not isinstance(value, Real) or not 0 <= cast(float, value) <= sys.float_info.max:
            raise StepError(
                f"work[{mb}] is {value!r}. Expected a finite number that is not negative."
            )
    return [float(value) for value in values]


def order_by_work(work: Sequence[float], placement: Placement) -> list[int]:
    """Return the microbatches as they run: see above. It takes microseconds.

    >>> order_by_work([3, 1, 4, 2, 5], Placement.linear(2))
    [1, 0, 4, 2, 3]
    >>> order_by_work([3, 1, 4, 2, 5], Placement.loop(2, stages_per_rank=2))
    [1, 3, 0, 2, 4]
    """
    rising = sorted(range(len(work)), key=work.__getitem__)
    stages_per_rank = placement.num_stages // placement.num_ranks
    if stages_per_rank > 1 and placement == Placement.loop(
        placement.num_ranks, stages_per_rank=stages_per_rank
    ):
        return rising
    return [*rising[::2], *rising[1::2][::-1]]


def as_given(values: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Return values of microbatches that ran in this order, as the microbatches were given."""
    by_microbatch = dict(zip(order, values, strict=True)) if order else dict(enumerate(values))
    return [by_microbatch[mb] for mb in range(len(by_microbatch))]


class WorkOrder:
    """The orders of a pipeline's steps: by work, or else as microbatches are given.

    Ranks that were given different work would mix microbatches, so they compare it. Each sends its
    own to the ranks that take their first activation from it. These would wait for that activation
    anyway, so none waits for longer.
    """

    def __init__(self, by_work: bool, device: torch.device) -> None:
        if not isinstance(by_work, bool):
            raise StageError(f"by_work is {by_work!r}. Expected True or False.")
        self.is_by_work = by_work
        self._device = device
        self._sent: list[tuple[Transfer, Tensor]] = []

    def arrange(self, batch: Batch, comm: AbstractComm, placement: Placement, work: Any) -> Batch:
        """Return the batch in the order in which it runs. All ranks must call it."""
        if not self.is_by_work:
            if work is not None:
                raise StepError(
                    "step() was given work, but the pipeline was made without by_work, so ranks "
                    "could run different orders. Make it with by_work=True on every rank."
                )
            return batch
        known = check_work(work, len(batch.args))
        self._compare(comm, placement, known)
        order = order_by_work(known, placement)
        return Batch(
            [batch.args[mb] for mb in order],
            [batch.kwargs[mb] for mb in order],
            [batch.targets[mb] for mb in order] if batch.targets else [],
            batch.loss_kwargs,
            order,
            [known[mb] for mb in order],
        )

    def _compare(self, comm: AbstractComm, placement: Placement, work: Sequence[float]) -> None:
        self.finish()
        own = torch.tensor(work, dtype=torch.float64, device=self._device)
        before = _rank_before(placement, comm.rank)
        if before is not None and not comm.is_dry:
            theirs = torch.empty_like(own)
            comm.recv(theirs, before).wait(lambda: f"{_WHAT} from rank {before}")
            if not torch.equal(own, theirs):
                raise AgreementError(
                    f"work is {list(work)} on rank {comm.rank}, but {theirs.tolist()} on rank "
                    f"{before}. Give all ranks the same."
                )
        for rank in _ranks_after(placement, comm.rank):
            self._sent.append((comm.send(own, rank), own))

    def finish(self) -> None:
        """Wait until the other ranks have taken what was sent to them."""
        sent, self._sent = self._sent, []
        for transfer, _ in sent:
            transfer.wait(lambda: f"the next rank to take {_WHAT}")


def _rank_before(placement: Placement, rank: Rank) -> Rank | None:
    """Return the rank that sends a rank its first activation; None if it holds the first stage."""
    first = placement.stages_of(rank)[0]
    return placement.ranks[first - 1] if first > 0 else None


def _ranks_after(placement: Placement, rank: Rank) -> list[Rank]:
    """Return the ranks that take their first activation from a rank, by looking at no others."""
    following = [stage + 1 for stage in placement.stages_of(rank)]
    return [
        placement.ranks[stage]
        for stage in following
        if stage < placement.num_stages and placement.stages_of(placement.ranks[stage])[0] == stage
    ]

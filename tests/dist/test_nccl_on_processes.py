"""The code for NCCL on real processes, with gloo in its place: how groups are made and meet."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from penstock.comm import ProcessGroupComm
from penstock.errors import DeadlineError
from penstock.ir.message import Channel
from stage_training import CPU, Run, assert_like_unsplit, train
from tied_models import TiedRun, assert_trains_as_unsplit, train_tied
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist


class _Options:
    _timeout = timedelta()


class GlooInPlaceOfNccl:
    """A group of two; gloo, as NCCL, waits for the other end while it connects."""

    Options = _Options

    def __init__(
        self, store: distributed_c10d.Store, rank: int, size: int, options: _Options
    ) -> None:
        self._arguments = store, rank, size, options._timeout
        self._group: Any = None

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> Any:
        return self._connected().send(tensors, receiver, tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Any:
        return self._connected().recv(tensors, sender, tag)

    def abort(self) -> None:
        self._group = None

    def _connected(self) -> Any:
        if self._group is None:
            self._group = distributed_c10d.ProcessGroupGloo(*self._arguments)
        return self._group


@contextmanager
def _as_if_nccl() -> Iterator[None]:
    """Let pipelines take the links of CUDA devices, though their tensors are on the CPU."""

    def open_links(self: ProcessGroupComm, device: torch.device) -> None:
        others = [r for r in range(self.num_ranks) if r != self.rank]
        self._open_pairs(device, others, self._pair_maker(torch.device("cuda")))

    with pytest.MonkeyPatch.context() as patch:
        # This torch may have been built without it.
        patch.setattr(distributed_c10d, "ProcessGroupNCCL", GlooInPlaceOfNccl, raising=False)
        patch.setattr(ProcessGroupComm, "_open_links", open_links)
        yield


def _train(group: dist.ProcessGroup, run: Run) -> Any:
    with _as_if_nccl():
        return train(group, run)


def _train_tied(group: dist.ProcessGroup, run: TiedRun) -> Any:
    with _as_if_nccl():
        return train_tied(group, run)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "ZB-V"])
def test_pipeline_trains(schedule: str, pool: WorkerPool) -> None:
    run = Run("mlp", schedule, 4, evaluates=True)
    assert_like_unsplit(run, pool.run(4, _train, run))


def test_tied_parameters_train(pool: WorkerPool) -> None:
    run = TiedRun("1F1B", 4)
    assert_trains_as_unsplit(run, pool.run(4, _train_tied, run))


def _open_alone(group: dist.ProcessGroup) -> str:
    """Rank 0 opens a channel, and rank 1 does not."""
    with _as_if_nccl():
        comm = ProcessGroupComm(group, CPU, timeout_s=0.5)
        said = ""
        if comm.rank == 0:
            with pytest.raises(DeadlineError) as caught:
                comm.open([Channel(0, 1)])
            said = str(caught.value)
        dist.barrier(group)
        comm.close()
        return said


def test_channel_that_one_end_opens_alone_is_told_in_time(pool: WorkerPool) -> None:
    assert "for rank 1 to connect to rank 0" in pool.run(2, _open_alone)[0]

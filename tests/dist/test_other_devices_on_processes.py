"""Channels over a backend that is neither gloo nor NCCL, as those of other accelerators.

There is no such accelerator here: the backend is registered as its authors would, and carries
tensors of the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock.comm import ProcessGroupComm
from penstock.comm.links import backend_for, backend_pair
from stage_training import Run, assert_like_unsplit, train
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist


def _extended(options: Any, _: Any) -> Any:
    arguments = options.store, options.group_rank, options.group_size, options.timeout
    return distributed_c10d.ProcessGroupGloo(*arguments)


def _register(name: str) -> None:
    if name in dist.Backend.backend_list:
        return
    if name == "turbine":
        dist.Backend.register_backend(name, distributed_c10d.ProcessGroupGloo, devices=["cpu"])
    else:
        dist.Backend.register_backend(name, _extended, extended_api=True, devices=["cpu"])


@contextmanager
def _as_if_on_another_device(name: str) -> Iterator[None]:
    def open_links(self: ProcessGroupComm, device: torch.device) -> None:
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        make_pair = partial(backend_pair, self._store, self.rank, self._timeout_s, name)
        self._open_pairs(device, others, make_pair)

    _register(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupComm, "_open_links", open_links)
        yield


def _train(group: dist.ProcessGroup, run: Run, name: str) -> Any:
    with _as_if_on_another_device(name):
        return train(group, run)


@pytest.mark.parametrize(("schedule", "name"), [("1F1B", "turbine"), ("ZB-V", "extended_turbine")])
def test_pipeline_trains_over_a_registered_backend(
    schedule: str, name: str, pool: WorkerPool
) -> None:
    run = Run("mlp", schedule, 4, evaluates=True)
    assert_like_unsplit(run, pool.run(4, _train, run, name))


def _names(group: dist.ProcessGroup) -> str:
    return backend_for(group, torch.device("cpu"))


def test_backend_is_that_of_the_process_group(pool: WorkerPool) -> None:
    assert ["gloo", "gloo"] == pool.run(2, _names)

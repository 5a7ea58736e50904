"""Tied parameters over processes: every copy gets the gradient of all, as if there were one.

`tests/runtime/test_tied_parameters.py` has more of it within one process.
"""

import gc
from functools import partial

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tied_models import TiedRecord, TiedRun, assert_trains_as_unsplit, train_tied
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("steps_per_update", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZB-V"])
def test_copies_train_as_one_parameter(
    schedule: str, num_ranks: int, steps_per_update: int, pool: WorkerPool
) -> None:
    run = TiedRun(schedule, num_ranks, steps_per_update=steps_per_update)
    assert_trains_as_unsplit(run, pool.run(num_ranks, train_tied, run))


def _train_replicas(
    world: dist.ProcessGroup, run: TiedRun, is_bucket_view: bool
) -> list[TiedRecord]:
    """Ranks 0 and 1 are one pipeline, ranks 2 and 3 the other; each gets half of the batch."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    wrap = partial(
        DistributedDataParallel,
        process_group=replicas[rank % 2],
        bucket_cap_mb=0.0005,
        gradient_as_bucket_view=is_bucket_view,
    )
    try:
        return train_tied(pipelines[rank // 2], run, wrap, slice(rank // 2, None, 2))
    finally:
        gc.collect()  # A reducer is in a cycle, and with it lives its group.
        for group in (pipelines[rank // 2], replicas[rank % 2]):
            dist.destroy_process_group(group)


@pytest.mark.parametrize("is_bucket_view", [False, True], ids=["own memory", "bucket views"])
@pytest.mark.parametrize("has_frozen_head", [False, True], ids=["all used", "one frozen"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_copies_that_data_parallel_stages_hold(
    schedule: str, has_frozen_head: bool, is_bucket_view: bool, pool: WorkerPool
) -> None:
    run = TiedRun(schedule, 2, steps_per_update=2, has_frozen_head=has_frozen_head)
    results = pool.run(4, _train_replicas, run, is_bucket_view)
    for replica in (results[:2], results[2:]):
        assert_trains_as_unsplit(run, replica)

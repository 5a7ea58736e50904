"""Many steps over either link leave nothing behind that adds up."""

import pytest
import torch.distributed as dist
from torch import nn

from fuzzing import rotated
from limits import HANG_S
from local_steps import mean_square, randn
from penstock import Pipeline, schedules
from stage_training import make_stages
from tensor_counts import growth_of, live_tensors, weights_and_grads
from worker_pool import LINKS, WorkerPool

pytestmark = pytest.mark.dist

# As in tests/runtime/test_growth.py.
ROWS, COLUMNS = 512, 64
ROOM_BYTES = 4_000_000


def _grow(group: dist.ProcessGroup, name: str) -> tuple[int, int]:
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    modules = [nn.Linear(COLUMNS, COLUMNS).double() for _ in range(schedule.num_stages)]
    held = schedule.placement.stages_of(dist.get_rank(group))
    pipeline = Pipeline(
        make_stages(group, modules, held), schedule, loss_fn=mean_square, timeout=HANG_S
    )
    x, target = randn(ROWS, COLUMNS), randn(ROWS, COLUMNS)
    return growth_of(lambda: pipeline.step(x, target=target))


def _leave(group: dist.ProcessGroup, name: str) -> list[tuple[int, ...]]:
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    modules = [nn.Linear(8, 8).double() for _ in range(schedule.num_stages)]
    held = schedule.placement.stages_of(dist.get_rank(group))
    pipeline = Pipeline(
        make_stages(group, modules, held), schedule, loss_fn=mean_square, timeout=HANG_S
    )
    x, target = randn(8, 8), randn(8, 8)
    before = live_tensors()
    outputs = None
    for _ in range(3):
        outputs = pipeline.step(x, target=target)
    returned = [] if outputs is None else [outputs]
    known = [*before, *weights_and_grads(modules), *returned]
    return [tuple(tensor.shape) for tensor in live_tensors(but=known)]


@rotated(name=["1F1B", "ZB-V"], link=LINKS)
def test_many_steps_do_not_grow(name: str, link: str, pool: WorkerPool) -> None:
    for tensors, memory in pool.run(2, _grow, name, link=link):
        assert 0 == tensors
        assert memory < ROOM_BYTES


@rotated(name=["1F1B", "ZB-V", "DualPipeV"], link=LINKS)
def test_after_a_step_only_weights_gradients_inputs_and_outputs_are_alive(
    name: str, link: str, pool: WorkerPool
) -> None:
    assert [[], []] == pool.run(2, _leave, name, link=link)

"""Recording on real ranks: one timeline of all of them, and what it says of its messages."""

import pytest
import torch.distributed as dist
from torch import nn

import penstock
from limits import HANG_S
from local_steps import mean_square, randn
from penstock import Pipeline, Recording, schedules
from penstock.errors import CommError
from penstock.ir.dataflow import Dataflow
from penstock.ir.walking import walk
from stage_training import make_stages
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

ROWS, COLUMNS = 64, 32


def _make(
    group: dist.ProcessGroup, name: str, num_ranks: int, *, timeout_s: float = HANG_S
) -> Pipeline:
    schedule = schedules.get(name)(num_ranks=num_ranks, num_microbatches=4)
    modules = [nn.Linear(COLUMNS, COLUMNS).double() for _ in range(schedule.num_stages)]
    held = schedule.placement.stages_of(dist.get_rank(group))
    return Pipeline(
        make_stages(group, modules, held), schedule, loss_fn=mean_square, timeout=timeout_s
    )


def _record(group: dist.ProcessGroup, name: str, num_ranks: int) -> Recording:
    pipeline = _make(group, name, num_ranks)
    x, target = randn(ROWS, COLUMNS), randn(ROWS, COLUMNS)
    pipeline.step(x, target=target)
    with penstock.record() as run:
        for _ in range(3):
            pipeline.step(x, target=target)
    pipeline.step(x, target=target)  # The pipeline goes on as before.
    return run.recording


@pytest.mark.parametrize(("name", "num_ranks"), [("1F1B", 4), ("ZB-V", 2), ("DualPipeV", 2)])
def test_ranks_record_one_timeline_in_which_messages_come_after_they_were_made(
    name: str, num_ranks: int, pool: WorkerPool
) -> None:
    recordings = pool.run(num_ranks, _record, name, num_ranks)
    assert [recordings[0]] * num_ranks == recordings
    for step in recordings[0].steps:
        timeline = step.timeline
        flow = Dataflow(timeline.schedule)
        began: dict[int, float] = {}
        position = [0] * num_ranks
        for rank, _, needed, delivered in walk(timeline.schedule):
            place = position[rank]
            position[rank] += 1
            for key in filter(flow.is_sent, needed):
                # Its maker's end may be later: it counts until the send has returned.
                assert began[key] < timeline.ends[rank][place]
            began |= dict.fromkeys(delivered, timeline.starts[rank][place])


def _record_on_one_rank(group: dist.ProcessGroup) -> str:
    pipeline = _make(group, "1F1B", 2, timeout_s=5.0)  # It is waited out.
    x, target = randn(ROWS, COLUMNS), randn(ROWS, COLUMNS)
    pipeline.step(x, target=target)
    try:
        if dist.get_rank(group) == 0:
            with penstock.record():
                pipeline.step(x, target=target)
        else:
            pipeline.step(x, target=target)
        pipeline.step(x, target=target)
    except CommError as error:
        return str(error)
    return "no error"


def test_ranks_that_do_not_all_gather_are_stopped_and_told_what_they_waited_for(
    pool: WorkerPool,
) -> None:
    alone, other = pool.run(2, _record_on_one_rank)
    assert "rank 1 to gather the recording" in alone
    assert "no error" != other

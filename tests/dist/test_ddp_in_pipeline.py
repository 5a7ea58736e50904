"""Stages wrapped in DistributedDataParallel: two pipelines of two ranks, which share gradients.

Ranks 0 and 1 are one pipeline, ranks 2 and 3 the other; each gets half of the batch.
"""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import penstock
from fuzzing import IS_LONG
from limits import HANG_S
from local_steps import mean_square
from penstock import Pipeline, PipelineStage, Schedule, SplitPoint, schedules
from penstock.errors import StageError
from stage_training import assert_close, assert_same_grads, make_stages
from staged_models import MODELS, StepRecord, make_optimizer, named_grads, train_unsplit
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

SIZE, NUM_STEPS = 16, 3


def _train(world: dist.ProcessGroup, name: str, is_traced: bool) -> list[StepRecord]:
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    try:
        return _train_in(pipelines[rank // 2], replicas[rank % 2], rank // 2, name, is_traced)
    finally:
        gc.collect()  # A reducer is in a cycle, and with it lives its group.
        for group in (pipelines[rank // 2], replicas[rank % 2]):
            dist.destroy_process_group(group)


def _wrap(module: nn.Module, replica_group: dist.ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=replica_group, bucket_cap_mb=0.0005)


def _make(
    schedule: Schedule, pipeline_group: dist.ProcessGroup, replica_group: dist.ProcessGroup
) -> tuple[list[PipelineStage], dict[int, nn.Module]]:
    """The stages of this rank, wrapped, and the modules inside."""
    held = schedule.placement.stages_of(dist.get_rank(pipeline_group))
    own = {index: MODELS["mlp"].stage(index, schedule.num_stages) for index in held}
    wrapped = [
        _wrap(own[index], replica_group) if index in own else None
        for index in range(schedule.num_stages)
    ]
    return make_stages(pipeline_group, wrapped, held), own


def _trace(
    schedule: Schedule, pipeline_group: dist.ProcessGroup, replica_group: dist.ProcessGroup
) -> tuple[list[PipelineStage], dict[int, nn.Module]]:
    """The same of a traced model, whose stages are wrapped after they were built."""
    model, count = MODELS["mlp"], schedule.num_stages
    whole = nn.Sequential(*(model.stage(index, count) for index in range(count)))
    (x,), _, _ = model.batch(SIZE // 2 // schedule.num_microbatches, 0)
    spec = {str(index): SplitPoint.BEGINNING for index in range(1, count)}
    pipe = penstock.cut(whole, (x,), split_spec=spec)
    held = schedule.placement.stages_of(dist.get_rank(pipeline_group))
    stages = [pipe.build_stage(index, "cpu", pipeline_group) for index in held]
    own = {index: s.submod.get_submodule(str(index)) for index, s in zip(held, stages, strict=True)}
    for stage in stages:
        stage.submod = _wrap(stage.submod, replica_group)
    return stages, own


def _train_in(
    pipeline_group: dist.ProcessGroup,
    replica_group: dist.ProcessGroup,
    replica: int,
    name: str,
    is_traced: bool,
) -> list[StepRecord]:
    model = MODELS["mlp"]
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    stages, own = (_trace if is_traced else _make)(schedule, pipeline_group, replica_group)
    pipeline = Pipeline(stages, schedule, loss_fn=mean_square, timeout=HANG_S)
    optimizer = make_optimizer(own.values(), SIZE, "mean")
    records = []
    for step in range(NUM_STEPS):
        args, _, target = model.batch(SIZE, step)
        half = slice(replica * SIZE // 2, (replica + 1) * SIZE // 2)
        optimizer.zero_grad()
        outputs = pipeline.step(args[0][half], target=target[half])
        records.append(StepRecord(outputs, [], named_grads(own)))
        optimizer.step()
    return records


RUNS = [("1F1B", False), ("ZB-V", True), ("DualPipeV", False)]
if IS_LONG:
    others = ("GPipe", "ZB-H1", "InterleavedZeroBubble", "ZB-V")
    RUNS += [*((name, False) for name in others), ("1F1B", True)]


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "is_traced"), RUNS)
def test_gradients_are_averaged_over_the_pipelines(
    name: str, is_traced: bool, pool: WorkerPool
) -> None:
    results = pool.run(4, _train, name, is_traced)
    num_stages = 2 * schedules.get(name).stages_per_rank
    expected = train_unsplit("mlp", num_stages, SIZE, "mean", NUM_STEPS)
    for step, wanted in enumerate(expected):
        for replica in (0, 1):
            ranks = [results[2 * replica + rank][step] for rank in (0, 1)]
            assert_same_grads(f"step {step}", wanted.grads, [record.grads for record in ranks])
            (outputs,) = (record.outputs for record in ranks if record.outputs is not None)
            assert_close("outputs", wanted.outputs.tensor_split(2)[replica], outputs)


def _wrap_and_look_for_unused(group: dist.ProcessGroup) -> str:
    wrapped = DistributedDataParallel(
        nn.Linear(2, 2), process_group=group, find_unused_parameters=True
    )
    try:
        PipelineStage(wrapped, 0, 1, "cpu", group=group)
    except StageError as error:
        return str(error)
    finally:
        del wrapped
        gc.collect()
    return ""


def test_stage_whose_wrapper_looks_for_unused_parameters_is_rejected(pool: WorkerPool) -> None:
    (message,) = pool.run(1, _wrap_and_look_for_unused)
    assert message.startswith(
        "stage 0 is wrapped in DistributedDataParallel with find_unused_parameters=True"
    )


class _HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        used: Tensor = self.used(x)
        return used


def _step_without_a_parameter(group: dist.ProcessGroup, schedule: str) -> str:
    """Each process is a pipeline, and a replica of the others."""
    wrapped = DistributedDataParallel(_HalfUsed(), process_group=group)
    [own, *_] = dist.new_subgroups(1)
    pipeline = Pipeline(
        PipelineStage(wrapped, 0, 1, "cpu", group=own),
        schedule,
        num_microbatches=2,
        loss_fn=nn.functional.mse_loss,
    )
    try:
        pipeline.step(torch.ones(2, 2), target=torch.ones(2, 2))
    except StageError as error:
        return str(error)
    finally:
        del wrapped, pipeline
        gc.collect()
    return ""


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_step_that_cannot_reduce_all_gradients_is_rejected(
    schedule: str, fresh_pool: WorkerPool
) -> None:
    """Its gradients were not averaged; torch only noticed in the forward of the next step."""
    for message in fresh_pool.run(4, _step_without_a_parameter, schedule):
        assert "its parameter 'unused.weight' and 1 more got no gradient" in message

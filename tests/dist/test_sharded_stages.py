"""Stages that others shard or reduce: gradients are right, or the pipeline is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from fuzzing import rotated
from local_steps import mean_square
from penstock import Pipeline, Schedule
from penstock.backward import SplitEngine, stage_backward_input
from penstock.errors import BackwardError, StageError
from stage_training import assert_close, make_stages
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

WIDTH = 8


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers).double()


def wrap(kind: str, module: nn.Sequential, mesh: Any) -> nn.Module:
    match kind:
        case "fully_shard":
            return fully_shard(module, mesh=mesh)
        case "replicate":
            return replicate(module, mesh=mesh)
        case "replicate by DDP":
            return replicate_by_ddp(module, process_group=mesh.get_group())
        case "fully_shard before DDP on a block":
            fully_shard(module[0], mesh=mesh)
            module[2] = DistributedDataParallel(module[2], process_group=mesh.get_group())
        case "static graph":
            group = mesh.get_group()
            return DistributedDataParallel(module, process_group=group, static_graph=True)
        case "DDP on a block":
            module[2] = DistributedDataParallel(module[2], process_group=mesh.get_group())
        case "FSDP1":
            cpu = torch.device("cpu")
            return FullyShardedDataParallel(
                module, process_group=mesh.get_group(), device_id=cpu, use_orig_params=True
            )
    return module


def refusal_of(world: dist.ProcessGroup, kind: str, schedule: str, wraps_late: bool) -> str:
    """What a pipeline of one rank says to a stage that two replicas share."""
    mesh = init_device_mesh("cpu", (2,))
    own = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    module = make_module()
    try:
        stages = make_stages(own, [module if wraps_late else wrap(kind, module, mesh)], [0])
        pipeline = Pipeline(stages, schedule, num_microbatches=2, loss_fn=mean_square)
        if wraps_late:
            stages[0].submod = wrap(kind, module, mesh)
            pipeline.step(torch.randn(4, WIDTH).double(), target=torch.randn(4, WIDTH).double())
    except StageError as error:
        return str(error)
    return ""


REFUSED = {
    "replicate by DDP": "it has replicate (built on DistributedDataParallel), which gives wrong",
    "DDP on a block": "its module '2' has DistributedDataParallel on a part of the stage, which",
    "FSDP1": "it has FullyShardedDataParallel (FSDP1), which gives wrong gradients in a pipeline",
    "fully_shard before DDP on a block": "its module '2' has DistributedDataParallel on a part",
}


@rotated(kind=list(REFUSED), wraps_late={"before": False, "after": True})
def test_stage_whose_gradients_would_be_wrong_is_refused(
    kind: str, wraps_late: bool, fresh_pool: WorkerPool
) -> None:
    for message in fresh_pool.run(2, refusal_of, kind, "1F1B", wraps_late):
        assert message.startswith("stage 0 on rank 0: ")
        assert REFUSED[kind] in message
        assert message.endswith("DistributedDataParallel: both work with every schedule.")


@pytest.mark.parametrize("wraps_late", [False, True], ids=["before", "after"])
def test_static_graph_of_ddp_is_refused(wraps_late: bool, fresh_pool: WorkerPool) -> None:
    for message in fresh_pool.run(2, refusal_of, "static graph", "ZB-H1", wraps_late):
        assert "DistributedDataParallel with static_graph=True" in message


def grads_of_unequal_replicas(
    world: dist.ProcessGroup, kind: str, schedule: str
) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    module = wrap(kind, make_module(), mesh)
    pipeline = Pipeline(
        make_stages(own, [module], [0]), schedule, num_microbatches=2, loss_fn=mean_square
    )
    x, target = batch()
    sizes = [5, 3]  # Replicas whose batches differ.
    pipeline.step(x.split(sizes)[rank], target=target.split(sizes)[rank])
    grads = {}
    for name, param in module.named_parameters():
        full = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        grads[name] = full.detach()
    return grads


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, target = torch.randn(2, 8, WIDTH).double()
    return x, target


@rotated(kind=["fully_shard", "replicate"], schedule=["1F1B", "ZB-H1"], num_cases=4)
def test_replicas_whose_batches_differ_train_as_one(
    kind: str, schedule: str, fresh_pool: WorkerPool
) -> None:
    module = make_module()
    x, target = batch()
    mean_square(module(x), target).backward()
    for grads in fresh_pool.run(2, grads_of_unequal_replicas, kind, schedule):
        for name, param in module.named_parameters():
            assert_close(name, param.grad, grads[name])


def grads_ended_by_hand(world: dist.ProcessGroup, schedule: str) -> list[dict[str, Tensor]]:
    """After each of two steps, of a module whose user has chosen to end backwards."""
    mesh = init_device_mesh("cpu", (2,))
    own = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    module = wrap("fully_shard", make_module(), mesh)
    module.set_manual_backward_finalization(True)
    pipeline = Pipeline(
        make_stages(own, [module], [0]), schedule, num_microbatches=2, loss_fn=mean_square
    )
    x, target = (part.chunk(2)[dist.get_rank()] for part in batch())
    grads = []
    for _ in range(2):
        module.zero_grad()
        pipeline.step(x, target=target)
        assert [] == module._get_fsdp_state()._comm_ctx.reduce_scatter_states  # Waited for.
        module.finalize_backward()  # Finds nothing left to do.
        grads.append({n: p.grad.full_tensor().detach() for n, p in module.named_parameters()})
    return grads


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"),
    reason="before torch 2.15, FSDP2 always ends backwards itself",
)
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_step_ends_backwards_though_the_user_would_end_them(
    schedule: str, fresh_pool: WorkerPool
) -> None:
    module = make_module()
    x, target = batch()
    mean_square(module(x), target).backward()
    for after_steps in fresh_pool.run(2, grads_ended_by_hand, schedule):
        for grads in after_steps:
            for name, param in module.named_parameters():
                assert_close(name, param.grad, grads[name])


def grads_in_reduce_dtype(world: dist.ProcessGroup) -> Tensor:
    """The gradient of microbatches whose sum 16 bits cannot hold."""
    mesh = init_device_mesh("cpu", (2,))
    own = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh, mp_policy=policy)
    pipeline = Pipeline(
        make_stages(own, [module], [0]),
        Schedule.from_csv("0F0,0F1,0F2,0F3,0I0,0I1,0I2,0I3,0W0,0W1,0W2,0W3\n"),
        loss_fn=lambda outputs, _: outputs.mean(),
    )
    x = torch.tensor([256.0, 1.0, 1.0, 1.0]).view(4, 1).expand(4, 2).contiguous()
    # With a gradient of the inputs, W multiplies by itself, after FSDP2's hooks.
    pipeline.step(x.clone().requires_grad_(), target=x)
    full: Tensor = module.weight.grad.full_tensor()
    return full


def test_microbatches_add_up_in_the_dtype_of_the_reduction(fresh_pool: WorkerPool) -> None:
    for grad in fresh_pool.run(2, grads_in_reduce_dtype):
        assert torch.equal(torch.full((2, 2), (256 + 3) / 8), grad)


def refusal_of_several_meshes(world: dist.ProcessGroup) -> str:
    own = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    module = make_module()
    for place, name in ((0, "one"), (2, "other")):
        fully_shard(module[place], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=(name,)))
    stages = make_stages(own, [module], [0])
    pipeline = Pipeline(stages, "1F1B", num_microbatches=2, loss_fn=mean_square)
    x, target = batch()
    try:
        pipeline.step(x, target=target)
    except StageError as error:
        return str(error)
    return ""


def test_stage_on_several_meshes_does_not_say_where_its_batch_is(fresh_pool: WorkerPool) -> None:
    for message in fresh_pool.run(2, refusal_of_several_meshes):
        assert message.startswith("stage 0 on rank 0 is sharded over several meshes")
        assert message.endswith("Give the pipeline the replica_group.")


def refusals_of_halves(world: dist.ProcessGroup) -> list[str]:
    module = fully_shard(make_module(), mesh=init_device_mesh("cpu", (2,)))
    x = torch.randn(4, WIDTH, requires_grad=True, dtype=torch.float64)
    messages = []
    try:
        SplitEngine(module)
    except BackwardError as error:
        messages.append(str(error))
    try:
        stage_backward_input([module(x).sum()], None, [x], module.parameters())
    except BackwardError as error:
        messages.append(str(error))
    return messages


def test_halves_of_a_sharded_module_are_refused(fresh_pool: WorkerPool) -> None:
    for by_engine, by_functions in fresh_pool.run(2, refusals_of_halves):
        assert "the module is sharded by fully_shard (FSDP2) or replicate" in by_engine
        assert "sharded by fully_shard (FSDP2) or replicate" in by_functions

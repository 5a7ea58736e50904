"""Sharded stages: what is refused before anything runs, and what a failure leaves behind."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fuzzing import rotated
from local_steps import mean_square
from mesh_training import WIDTH, Block, make_stages
from penstock import Pipeline, PipelineStage, schedules
from penstock.errors import AgreementError, StageError
from penstock.passes import Gathers, add_gathers
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, target = torch.randn(2, 8, 4, WIDTH).double()
    return x, target


def make_pipeline(
    kind: str, schedule: str = "ZB-V", **options: Any
) -> tuple[Pipeline, dict[int, nn.Module]]:
    """Two pipelines of two ranks, with a fault of the kind."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    made = schedules.get(schedule)(num_ranks=2, num_microbatches=4)
    modules: list[nn.Module] = list(make_stages("plain", made.num_stages))
    held = made.placement.stages_of(mesh["pp"].get_local_rank())
    if kind == "shared":
        modules[held[1]] = modules[held[0]]
    for index in held:
        if kind == "no mesh":
            fully_shard(modules[index], mesh=init_device_mesh("cpu", (4,)))
        elif kind == "DDP over all":
            modules[index] = DistributedDataParallel(modules[index])
        elif kind == "part":
            fully_shard(modules[index][1], mesh=mesh["dp"])
        elif kind != "late" and not (kind == "shared" and index == held[1]):
            fully_shard(modules[index], mesh=mesh["dp"])
    own = {index: modules[index] for index in held}
    stages = [
        PipelineStage(module, index, made.num_stages, "cpu", group=mesh["pp"])
        for index, module in own.items()
    ]
    if kind == "gathers":
        made = add_gathers(made, Gathers.once())
    pipeline = Pipeline(stages, made, loss_fn=mean_square, **options)
    if kind == "late":
        x, target = batch()
        pipeline.step(x, target=target)
        for stage in stages:
            stage.submod = fully_shard(stage.submod, mesh=mesh["dp"])
    return pipeline, own


REFUSED = {
    "no mesh": "hold stages of the same pipeline. Give fully_shard the mesh",
    "DDP over all": "hold stages of the same pipeline. Give fully_shard the mesh",
    "part": "its parameter '0.norm.weight' is in no module that was sharded, while others are",
    "shared": "share a sharded module, whose gradients would be reduced before both have added",
    "late": "was wrapped in data parallelism after the first step",
}


def refusal_of(_: dist.ProcessGroup, kind: str) -> str:
    x, target = batch()
    try:
        pipeline, _own = make_pipeline(kind)
        pipeline.step(x, target=target)
    except StageError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", REFUSED)
def test_stage_that_would_train_wrongly_or_wait_for_ever_is_refused(
    kind: str, fresh_pool: WorkerPool
) -> None:
    for message in fresh_pool.run(4, refusal_of, kind):
        assert REFUSED[kind] in message


def calls_of(_: dist.ProcessGroup, kind: str) -> list[int]:
    called: list[int] = []
    note = lambda stage: called.append(stage.stage_index)  # noqa: E731
    pipeline, _own = make_pipeline(kind, on_grads_ready=note)
    x, target = batch()
    pipeline.step(x, target=target)
    return called


@pytest.mark.parametrize("kind", ["gathers", "FSDP2"])
def test_grads_are_ready_once(kind: str, fresh_pool: WorkerPool) -> None:
    for rank, called in enumerate(fresh_pool.run(4, calls_of, kind)):
        assert sorted(called) == ([0, 3] if rank < 2 else [1, 2])


def fail_in_eval(_: dist.ProcessGroup) -> bool:
    pipeline, own = make_pipeline("FSDP2", "1F1B")
    x, target = batch()
    pipeline.step(x, target=target)
    [module] = own.values()
    count = 0

    def fail(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise ValueError("the second microbatch")

    module.get_submodule("1").register_forward_pre_hook(fail)
    with pytest.raises(Exception, match="the second microbatch"):
        pipeline.eval(x)
    return all(isinstance(param, DTensor) for param in module.parameters())


def test_parameters_are_sharded_after_an_eval_that_failed(fresh_pool: WorkerPool) -> None:
    assert [True] * 4 == fresh_pool.run(4, fail_in_eval)


def tie_across(_: dist.ProcessGroup) -> str:
    """Pipelines whose ranks are at different places of the meshes of their stages."""
    order = [[0, 3], [1, 2]]
    groups = [dist.new_group(ranks) for ranks in order]
    rank = dist.get_rank()
    group = next(g for g, ranks in zip(groups, order, strict=True) if rank in ranks)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    module = nn.Sequential(Block()).double()
    fully_shard(module, mesh=mesh["dp"])
    index = 0 if rank < 2 else 1
    stage = PipelineStage(module, index, 2, "cpu", group=group, tied={"0.up.weight": "shared"})
    pipeline = Pipeline([stage], "1F1B", num_microbatches=2, loss_fn=mean_square)
    x, target = batch()
    try:
        pipeline.step(x, target=target)
    except AgreementError as error:
        return str(error)
    return "nothing"


def test_copies_of_which_a_rank_holds_different_parts_are_refused(fresh_pool: WorkerPool) -> None:
    for message in fresh_pool.run(4, tie_across):
        assert "the same part of it if it is spread over a mesh" in message


def grads_in_reduce_dtype(_: dist.ProcessGroup, schedule: str) -> list[tuple[Tensor, Tensor]]:
    """With a pipeline, and by FSDP2 alone, which adds up gradients microbatch by microbatch."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    made = schedules.get(schedule)(num_ranks=2, num_microbatches=4)

    def wrapped() -> list[nn.Sequential]:
        modules = [module.float() for module in make_stages("plain", made.num_stages)]
        for module in modules:
            fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        return modules

    held = made.placement.stages_of(mesh["pp"].get_local_rank())
    modules, whole = wrapped(), wrapped()
    stages = [PipelineStage(modules[i], i, made.num_stages, "cpu", group=mesh["pp"]) for i in held]
    x, target = (tensor.bfloat16() for tensor in batch())
    Pipeline(stages, made, loss_fn=mean_square).step(x, target=target)
    for number, (part, goal) in enumerate(zip(x.chunk(4), target.chunk(4), strict=True)):
        for module in whole:
            module.set_requires_gradient_sync(number == 3)
        (mean_square(nn.Sequential(*whole)(part), goal) / 4).backward()
    return [
        (mine.grad.to_local(), theirs.grad.to_local())
        for i in held
        for mine, theirs in zip(modules[i].parameters(), whole[i].parameters(), strict=True)
    ]


@rotated(schedule=["1F1B", "ZB-V"])
def test_gradients_add_up_in_the_dtype_in_which_they_are_reduced(
    schedule: str, fresh_pool: WorkerPool
) -> None:
    for pairs in fresh_pool.run(4, grads_in_reduce_dtype, schedule):
        for mine, theirs in pairs:
            assert torch.float32 == mine.dtype
            assert torch.equal(theirs, mine)


class _Product(torch.autograd.Function):
    """Leaves the gradient of its weight to the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, left: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left = left
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.left.append((x.flatten(0, -2), grads[0].flatten(0, -2)))
        return grads[0] @ weight.t(), None, None


class OwnBackward(nn.Module):
    """A module that computes its weight gradients by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)
        self.left: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self.weight, self.left)
        return out

    def build(self) -> Any:
        pairs = self.left.copy()
        self.left.clear()  # Forwards that have run hold this very list.

        def run() -> None:
            for x, grad in pairs:
                new = x.t() @ grad
                self.weight.grad = new if self.weight.grad is None else self.weight.grad + new

        return run


def grads_of_own_backward(_: dist.ProcessGroup, frees: bool) -> list[tuple[Tensor, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    made = schedules.get("ZB-V")(num_ranks=2, num_microbatches=4)
    torch.manual_seed(0)
    modules = [OwnBackward() for _ in range(made.num_stages)]
    weights = [module.weight.detach().clone().requires_grad_() for module in modules]
    stages = []
    for index in made.placement.stages_of(mesh["pp"].get_local_rank()):
        module = fully_shard(modules[index], mesh=mesh["dp"], reshard_after_forward=frees)
        stages.append(
            PipelineStage(
                module, index, made.num_stages, "cpu", group=mesh["pp"], dw_builder=module.build
            )
        )
    x, target = batch()
    Pipeline(stages, made, loss_fn=mean_square).step(x, target=target)
    whole = x
    for weight in weights:
        whole = whole @ weight
    mean_square(whole, target).backward()
    return [
        (stage.submod.weight.grad.full_tensor(), weights[stage.stage_index].grad)
        for stage in stages
    ]


@pytest.mark.parametrize("frees", [True, False])
def test_weight_backward_of_the_module_s_own_runs_on_gathered_parameters(
    frees: bool, fresh_pool: WorkerPool
) -> None:
    for pairs in fresh_pool.run(4, grads_of_own_backward, frees):
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs)

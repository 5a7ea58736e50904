"""What training loops do around a step: optimizers, checkpoints, accumulation, evaluation.

Stages are plain, in DDP or sharded by FSDP2, on 2 x 2 processes unless a test says otherwise.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_nets import (
    Block,
    Rank,
    assert_near,
    in_full,
    make_batch,
    make_rank,
    make_whole,
    own_half,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

import penstock
from limits import HANG_S
from local_steps import mean_square
from penstock import ParallelModel, Pipeline, PipelineStage
from penstock.errors import CommError
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
NUM_STEPS = 3


def train(rank: Rank, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Steps over the batches with these numbers, of which each replica has its part."""
    for number in numbers:
        optimizer.zero_grad()
        x, target = (own_half(rank, values) for values in make_batch(number))
        rank.pipeline.step(x, target=target)
        optimizer.step()


def train_whole(num_steps: int, num_blocks: int = 4) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    whole = make_whole(num_blocks=num_blocks)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for number in range(num_steps):
        optimizer.zero_grad()
        x, target = make_batch(number)
        mean_square(whole(x), target).backward()
        optimizer.step()
    return whole, optimizer


# The optimizer of a stage steps as soon as its gradients are complete.


def step_early(world: dist.ProcessGroup, kinds: list[str], is_early: bool) -> dict[str, Any]:
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def step(stage: PipelineStage) -> None:
        if kinds[stage.stage_index] == "plain":
            for weight in stage.submod.parameters():
                dist.all_reduce(weight.grad, group=replicas)
                weight.grad /= 2
        optimizers[stage.stage_index].step()

    rank = make_rank(kinds, on_grads_ready=step if is_early else None)
    replicas = rank.mesh.get_group("replicas")
    for index, module in rank.modules.items():
        optimizers[index] = torch.optim.AdamW(module.parameters(), lr=0.01)
    for number in range(NUM_STEPS):
        rank.zero_grad()
        x, target = (own_half(rank, values) for values in make_batch(number))
        rank.pipeline.step(x, target=target)
        if not is_early:
            for stage in rank.stages:
                step(stage)
    return rank.values()


def test_optimizer_that_steps_early_equals_one_that_steps_at_the_end(
    fresh_pool: WorkerPool,
) -> None:
    kinds = ["fsdp", "plain", "fsdp", "ddp"]
    early = fresh_pool.run(4, step_early, kinds, True)
    late = fresh_pool.run(4, step_early, kinds, False)
    expected = train_whole(NUM_STEPS)[0].state_dict()
    for values, others in zip(early, late, strict=True):
        for name, value in values.items():
            assert value.equal(others[name]), name
            assert_near(name, expected[name], value)


# Optimizers with parameters of both kinds on one rank.


def shown(name: str) -> Any:
    """A function or class that the page on training shows."""
    page = (ROOT / "docs" / "training_loop.md").read_text()
    [block] = re.findall(rf"```python\n([^`]*(?:def|class) {name}\b[^`]*)```", page)
    names: dict[str, Any] = {}
    exec(block, names)
    return names[name]


OPTIMIZERS = [
    ("SGD", {"foreach": True, "momentum": 0.9}),
    ("Adam", {"foreach": True}),
    ("Adam", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {}),
]


def optimize_both_kinds(world: dist.ProcessGroup) -> list[tuple[bool, dict[str, Any]]]:
    found = []
    for name, options in OPTIMIZERS:
        rank = make_rank(["plain", "tp", "ddp", "fsdp"])  # One of each on a rank.
        make = getattr(torch.optim, name)
        x, target = make_batch()
        rank.pipeline.step(x, target=target)
        refuses = False
        try:
            make(rank.parameters(), lr=0.0, weight_decay=0.0, **options).step()
        except RuntimeError as error:
            refuses = "mixed torch.Tensor and DTensor" in str(error)
        make(shown("groups_by_kind")(rank.parameters()), lr=0.01, **options).step()
        found.append((refuses, rank.values()))
    return found


def test_optimizers_take_one_kind_of_parameters_per_group(fresh_pool: WorkerPool) -> None:
    ranks = fresh_pool.run(4, optimize_both_kinds)
    x, target = make_batch()
    for number, (name, options) in enumerate(OPTIMIZERS):
        whole = make_whole()
        mean_square(whole(x), target).backward()
        getattr(torch.optim, name)(whole.parameters(), lr=0.01, **options).step()
        for found in ranks:
            refuses, values = found[number]
            assert refuses == bool(options)  # torch's own default on CPUs takes a mix.
            for param_name, value in values.items():
                assert_near(f"{name}, {param_name}", whole.state_dict()[param_name], value)


# Scaled losses, and a gradient that overflows in one microbatch of one rank.

SCALES = {"init_scale": 2.0**10, "growth_interval": 2}


def batch_with_spike(number: int) -> tuple[Tensor, Tensor]:
    x, target = make_batch(number)
    if number == 1:
        x[5, 0] = 2e3
    return x, target


def train_scaled(world: dist.ProcessGroup, kinds: list[str]) -> tuple[list[float], dict[str, Any]]:
    """The recipe of the docs with torch's scaler: each rank has parameters of one kind."""
    scaler = ShardedGradScaler(device="cpu", process_group=world, **SCALES)
    scaler.scale(torch.zeros(1))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) * scaler.get_scale()

    rank = make_rank(kinds, blocks=make_spiky_blocks(), loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(rank.parameters(), lr=0.01)
    scales = []
    for number in range(4):
        optimizer.zero_grad()
        x, target = (own_half(rank, values) for values in batch_with_spike(number))
        rank.pipeline.step(x, target=target)
        with warnings.catch_warnings():  # Of the scaler's flag, which torch itself makes.
            warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")
            scaler.unscale_(optimizer)
        rank.pipeline.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, rank.values()


def train_by_the_norm(
    world: dist.ProcessGroup, kinds: list[str]
) -> tuple[list[float], dict[str, Any]]:
    """The other recipe: stages of all kinds, so that all replicas train on the same batch."""
    scale = shown("LossScale")(SCALES["init_scale"], SCALES["growth_interval"])

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) * scale.value

    rank = make_rank(kinds, blocks=make_spiky_blocks(), loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(rank.parameters(), lr=0.01)
    scales = []
    for number in range(4):
        optimizer.zero_grad()
        x, target = batch_with_spike(number)
        rank.pipeline.step(x, target=target)
        for weight in rank.parameters():
            weight.grad /= scale.value
        is_finite = bool(rank.pipeline.clip_grad_norm_(0.5).isfinite())
        if is_finite:
            optimizer.step()
        scale.update(is_finite)
        scales.append(scale.value)
    return scales, rank.values()


def make_spiky_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(has_gain=index == 0).double() for index in range(4)]


@pytest.mark.parametrize(
    ("train_on_rank", "kinds"),
    [
        (train_scaled, ["fsdp", "fsdp", "fsdp", "fsdp"]),
        (train_scaled, ["ddp", "fsdp", "fsdp", "ddp"]),
        (train_by_the_norm, ["plain", "tp", "ddp", "fsdp"]),
    ],
    ids=["scaler, shards", "scaler, DDP and shards", "norm, all kinds"],
)
def test_scaled_training_skips_a_step_as_the_whole_model_does(
    train_on_rank: Any, kinds: list[str], fresh_pool: WorkerPool
) -> None:
    whole = nn.Sequential(*make_spiky_blocks())
    scaler = torch.amp.GradScaler("cpu", **SCALES)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    expected = []
    for number in range(4):
        optimizer.zero_grad()
        x, target = batch_with_spike(number)
        scaler.scale(mean_square(whole(x), target)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    assert [1024.0, 512.0, 512.0, 1024.0] == expected
    for scales, values in fresh_pool.run(4, train_on_rank, kinds):
        assert expected == scales
        for name, value in values.items():
            assert_near(name, whole.state_dict()[name], value)


# Checkpoints of sharded stages.


def make_pipe(shape: tuple[int, int], schedule: str, num_stages: int) -> ParallelModel:
    """A cut of the whole model, whose stages keep its names, with each block sharded."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "fsdp"))
    model = make_whole()
    return penstock.parallelize(
        model,
        make_batch()[:1],
        loss_fn=mean_square,
        schedule=schedule,
        num_microbatches=4,
        cut=penstock.cut_between_modules(model, num_stages),
        mesh=mesh,
        timeout=HANG_S,
    )


def train_pipe(
    pipe: ParallelModel, optimizer: torch.optim.Optimizer, numbers: range, num_replicas: int
) -> None:
    replica = dist.get_rank() % num_replicas
    for number in numbers:
        x, target = (values.chunk(num_replicas)[replica] for values in make_batch(number))
        optimizer.zero_grad()
        pipe.step(x, target=target)
        optimizer.step()


def values_of(pipe: ParallelModel) -> dict[str, Tensor | None]:
    return {name: in_full(weight.detach()) for name, weight in pipe.named_parameters()}


def save_and_go_on(world: dist.ProcessGroup, folder: str) -> dict[str, Tensor | None]:
    pipe = make_pipe((2, 2), "ZB-V", 4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    train_pipe(pipe, optimizer, range(2), 2)
    pipe.save(folder, optimizer, extra={"step": 2})
    train_pipe(pipe, optimizer, range(2, 4), 2)
    return values_of(pipe)


def resume(
    world: dist.ProcessGroup, folder: str, shape: tuple[int, int], schedule: str, num_stages: int
) -> dict[str, Tensor | None]:
    pipe = make_pipe(shape, schedule, num_stages)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    assert {"step": 2} == pipe.load(folder, optimizer)
    train_pipe(pipe, optimizer, range(2, 4), shape[1])
    return values_of(pipe)


def test_sharded_stages_go_on_from_a_checkpoint_on_any_mesh(
    fresh_pool: WorkerPool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    saved = fresh_pool.run(4, save_and_go_on, folder)
    whole, _ = train_whole(4)
    expected = whole.state_dict()
    for (shape, schedule, num_stages), is_same in {
        ((2, 2), "ZB-V", 4): True,
        ((4, 1), "1F1B", 4): False,
        ((1, 4), "1F1B", 1): False,
    }.items():
        ranks = fresh_pool.run(4, resume, folder, shape, schedule, num_stages)
        assert set(expected) == {name for values in ranks for name in values}
        for number, values in enumerate(ranks):
            for name, value in values.items():
                assert_near(f"{shape}, {name}", expected[name], value)
                assert not is_same or value.equal(saved[number][name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # As no_dist says.
def test_checkpoint_of_sharded_stages_is_loaded_into_the_whole_model(
    fresh_pool: WorkerPool, tmp_path: Path
) -> None:
    fresh_pool.run(4, save_and_go_on, str(tmp_path / "state"))
    whole, optimizer = train_whole(1)  # Other weights, and an optimizer that has its tensors.
    state: dict[str, Any] = {f"model.{name}": v for name, v in whole.state_dict().items()}
    for name, weight in whole.named_parameters():
        kept = optimizer.state[weight].items()
        state |= {f"optimizer.state.{name}.{kind}": value for kind, value in kept}
    dcp.load(state, checkpoint_id=tmp_path / "state", no_dist=True)
    expected, theirs = train_whole(2)
    for (name, value), weight in zip(
        expected.state_dict().items(), expected.parameters(), strict=True
    ):
        assert_near(name, value, whole.state_dict()[name])
        for kind, kept in theirs.state[weight].items():
            assert_near(f"{kind} of {name}", kept, state[f"optimizer.state.{name}.{kind}"])


# Gradients that add up over several steps, steps that fail, and evaluation between steps.


def accumulate(world: dist.ProcessGroup, schedule: str) -> tuple[bool, dict[str, Any]]:
    rank = make_rank(["fsdp"] * (4 if schedule == "ZB-V" else 2), schedule)
    for number in range(3):
        is_last = number == 2
        for stage in rank.stages:
            stage.submod.set_requires_gradient_sync(is_last)
        x, target = (own_half(rank, values) for values in make_batch(number))
        rank.pipeline.step(x, target=target)
        if not is_last:
            is_unreduced = all(weight.grad is None for weight in rank.parameters())
    return is_unreduced, rank.grads()


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_gradients_of_several_steps_are_those_of_a_large_one(
    schedule: str, fresh_pool: WorkerPool
) -> None:
    whole = make_whole(num_blocks=4 if schedule == "ZB-V" else 2)
    x, target = map(torch.cat, zip(*map(make_batch, range(3)), strict=True))
    (3 * mean_square(whole(x), target)).backward()  # The sum of the means of three batches.
    for is_unreduced, grads in fresh_pool.run(4, accumulate, schedule):
        assert is_unreduced
        for name, grad in grads.items():
            assert_near(name, whole.get_parameter(name).grad, grad)


class Fails(torch.autograd.Function):
    """Raises in the third backward."""

    num_backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Fails.num_backwards += 1
        if Fails.num_backwards == 3:
            raise ArithmeticError("in the third backward")
        return grad


def fail_then_step(
    world: dist.ProcessGroup, schedule: str, frees: bool
) -> tuple[str, bool, dict[str, Any]]:
    """Both replicas fail alike: otherwise one would wait for the other until torch's timeout."""
    kinds = ["fsdp, freed" if frees else "fsdp"] * (4 if schedule == "ZB-V" else 2)
    rank = make_rank(kinds, schedule)
    x, target = (own_half(rank, values) for values in make_batch())
    last = len(kinds) - 1
    hook = None
    Fails.num_backwards = 0
    if last in rank.modules:
        layers = rank.modules[last].layers
        hook = layers.register_forward_hook(lambda module, args, output: Fails.apply(output))
    kind = ""
    try:
        rank.pipeline.step(x, target=target)
    except (ArithmeticError, CommError) as error:
        kind = type(error).__name__
    if hook is not None:
        hook.remove()
    is_sharded = all(isinstance(weight, DTensor) for weight in rank.parameters())
    is_reset = is_sharded and all(weight.grad is None for weight in rank.parameters())
    dist.barrier(world)
    again = Pipeline(rank.stages, rank.pipeline.schedule, loss_fn=mean_square, timeout=HANG_S)
    again.step(x, target=target)
    return kind, is_reset, rank.grads()


@pytest.mark.parametrize(
    ("schedule", "frees"), [("1F1B", True), ("ZB-V", False)], ids=["full", "split"]
)
def test_step_after_one_that_failed_is_right(
    schedule: str, frees: bool, fresh_pool: WorkerPool
) -> None:
    results = fresh_pool.run(4, fail_then_step, schedule, frees)
    whole = make_whole(num_blocks=4 if schedule == "ZB-V" else 2)
    x, target = make_batch()
    mean_square(whole(x), target).backward()
    assert {"ArithmeticError", "CommError"} == {kind for kind, _, _ in results}
    for _, is_reset, grads in results:
        assert is_reset
        for name, grad in grads.items():
            assert_near(name, whole.get_parameter(name).grad, grad)


def evaluate_between(world: dist.ProcessGroup) -> tuple[bool, Any, dict[str, Any]]:
    rank = make_rank(["fsdp"] * 4)
    x, target = (own_half(rank, values) for values in make_batch())
    outputs = rank.pipeline.eval(x)
    is_sharded = all(isinstance(weight, DTensor) for weight in rank.parameters())
    rank.pipeline.step(x, target=target)
    before = rank.grads()
    again = rank.pipeline.eval(x)
    is_sharded = is_sharded and all(isinstance(weight, DTensor) for weight in rank.parameters())
    if outputs is not None:
        assert torch.equal(outputs, again)
    for name, grad in rank.grads().items():
        assert torch.equal(before[name], grad)
    rank.pipeline.step(x, target=target)
    return is_sharded, outputs, rank.grads()


def test_evaluation_between_steps_leaves_parameters_sharded(fresh_pool: WorkerPool) -> None:
    whole = make_whole()
    x, target = make_batch()
    (2 * mean_square(whole(x), target)).backward()
    for number, (is_sharded, outputs, grads) in enumerate(fresh_pool.run(4, evaluate_between)):
        assert is_sharded
        if outputs is not None:
            assert_near("outputs", whole(x).detach().chunk(2)[number % 2], outputs)
        for name, grad in grads.items():
            assert_near(name, whole.get_parameter(name).grad, grad)


def grads_around_a_failure(
    world: dist.ProcessGroup, schedule: str
) -> list[tuple[Tensor | None, Tensor | None]]:
    rank = make_rank(["fsdp"] * (4 if schedule == "ZB-V" else 2), schedule)
    x, target = (own_half(rank, values) for values in make_batch())
    rank.pipeline.step(x, target=target)
    before = rank.grads()
    hooks = [
        module.layers.register_forward_hook(lambda module, args, output: Fails.apply(output))
        for module in rank.modules.values()
    ]
    Fails.num_backwards = 0
    with pytest.raises((ArithmeticError, CommError)):
        rank.pipeline.step(x, target=target)
    for hook in hooks:
        hook.remove()
    dist.barrier(world)
    after = rank.grads()
    return [(before[name], after[name]) for name in before]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_gradients_of_earlier_steps_survive_one_that_failed(
    schedule: str, fresh_pool: WorkerPool
) -> None:
    """From torch 2.15 on, `reset_iter_state` drops what was reduced before."""
    for pairs in fresh_pool.run(4, grads_around_a_failure, schedule):
        assert pairs
        for before, after in pairs:
            assert before is not None
            assert after is not None
            assert torch.equal(before, after)

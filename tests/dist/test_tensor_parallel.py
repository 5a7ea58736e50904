"""The split backward of modules with DTensor parameters: as plain autograd, with products in W."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensor_parallel_cases import (
    COLUMNS_THEN_ROWS,
    ON_FOUR,
    ON_TWO,
    WIDTH,
    Case,
    Mlp,
    placed,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.flop_counter import FlopCounterMode

from local_steps import mean_square
from penstock import Pipeline
from penstock.backward import SplitEngine, stage_backward_input, stage_backward_weight
from penstock.backward.sharded_products import product_of
from penstock.backward.terms import ShardedProduct, value_of
from penstock.errors import BackwardError
from stage_training import assert_close, make_stages
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

NUM_MICROBATCHES = 3


def same_twice(case: Case, mesh: DeviceMesh) -> list[nn.Module]:
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        module = case.make(mesh).to(case.dtype)
        if case.before is not None:
            for param in module.parameters():
                local = torch.ones_like(param.to_local())
                placements = [case.before] * mesh.ndim
                param.grad = DTensor.from_local(local, mesh, placements, run_check=False)
        modules.append(module)
    return modules


def microbatches(case: Case) -> list[Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    return [torch.randn(case.shape).to(case.dtype) for _ in range(NUM_MICROBATCHES)]


def differences(name: str, expected: Tensor | None, found: Tensor | None) -> list[str]:
    """What is not the same: kind, placements, layout, dtype or values."""
    if expected is None or found is None:
        return [] if expected is found else [f"{name}: {expected} is not {found}"]
    forms = [_form(expected), _form(found)]
    if forms[0] != forms[1]:
        return [f"{name}: {forms[0]} is not {forms[1]}"]
    if isinstance(expected, DTensor) and isinstance(found, DTensor):
        expected, found = expected.to_local(), found.to_local()
    is_same = torch.equal(expected, found)
    return [] if is_same else [f"{name}: off by {(expected - found).abs().max():.1e}"]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    form = type(tensor), tensor.shape, tensor.stride(), tensor.dtype
    if not isinstance(tensor, DTensor):
        return form
    local = tensor.to_local()
    return *form, tensor.placements, local.shape, local.stride()


def compare(expected: nn.Module, found: nn.Module) -> list[str]:
    pairs = zip(expected.named_parameters(), found.parameters(), strict=True)
    return [text for (name, p), q in pairs for text in differences(name, p.grad, q.grad)]


def check_engine(case: Case, mesh: DeviceMesh) -> list[str]:
    """What is wrong with the halves of this case, against autograd's whole backward."""
    reference, module = same_twice(case, mesh)
    engine = SplitEngine(module)
    wrong: list[str] = []
    pending = []
    for values in microbatches(case):
        x, y = (values.clone().requires_grad_() for _ in range(2))
        out = reference(x)
        torch.manual_seed(2)
        grad_of_out = torch.randn(out.shape, dtype=out.dtype)
        out.backward(grad_of_out)
        forward = engine.forward(y)
        wrong += differences("output", out.detach(), forward.outputs.detach())
        (grad,), weights = forward.backward_input(grad_of_out)
        wrong += differences("input", x.grad, grad.contiguous())
        pending.append(weights)
    for weights in pending:
        with CommDebugMode() as comms, FlopCounterMode(display=False) as flops:
            weights.run()
        wrong += said_in_w(case, comms)
        if case.weight_flops_per_row is not None:
            expected = case.weight_flops_per_row * x.numel() // x.shape[-1]
            if flops.get_total_flops() != expected:
                wrong.append(f"W has {flops.get_total_flops()} operations, not {expected}")
    return wrong + compare(reference, module)


def said_in_w(case: Case, comms: CommDebugMode) -> list[str]:
    if case.is_quiet and comms.get_total_counts():
        return [f"W communicates: {comms.get_comm_counts()}"]
    return []


def check_functions(case: Case, mesh: DeviceMesh) -> list[str]:
    reference, module = same_twice(case, mesh)
    wrong: list[str] = []
    for values in microbatches(case):
        x, y = (values.clone().requires_grad_() for _ in range(2))
        reference(x).square().sum().backward()
        loss = module(y).square().sum()
        (grad,), groups = stage_backward_input([loss], None, [y], module.parameters())
        wrong += differences("input", x.grad, grad.contiguous())
        with CommDebugMode() as comms:
            stage_backward_weight(module.parameters(), groups)
        wrong += said_in_w(case, comms)
    return wrong + compare(reference, module)


def check_all(world: Any, name: str) -> dict[str, list[str]]:
    """What is wrong, by case. Cases have functions, which cannot be sent to a worker."""
    if name == "line":
        cases, mesh = ON_TWO, DeviceMesh.from_group(world, "cpu")
    else:
        cases, mesh = ON_FOUR, init_device_mesh("cpu", (2, 2))
    found = {}
    for name, case in cases.items():
        found[name] = check_engine(case, mesh)
        found[f"{name}, by the functions"] = check_functions(case, mesh)
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize(("num_ranks", "mesh"), [(2, "line"), (4, "plane")])
def test_halves_are_those_of_autograd(num_ranks: int, mesh: str, fresh_pool: WorkerPool) -> None:
    for wrong in fresh_pool.run(num_ranks, check_all, mesh):
        assert {} == wrong


def check_rule(world: Any) -> list[str]:
    """The pairs of placements whose product differs from DTensor's own."""
    mesh = DeviceMesh.from_group(world, "cpu")
    torch.manual_seed(dist.get_rank())
    wrong: list[str] = []
    kinds = [Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max")]
    for of_left, of_right in itertools.product(kinds, repeat=2):
        left, right = (
            DTensor.from_local(
                distribute_tensor(torch.randn(shape).double(), mesh, [kind]).to_local()
                if kind.is_shard()
                else torch.randn(shape).double(),
                mesh,
                [kind],
                run_check=False,
                shape=torch.Size(shape),
                stride=(shape[1], 1),
            )
            for shape, kind in (((5, 7), of_left), ((7, 3), of_right))
        )
        expected = (left @ right).t().mul(2)
        with CommDebugMode() as comms:
            term = product_of(left, right, 2, is_transposed=True)
            found = value_of(term)
        name = f"{of_left} @ {of_right}"
        wrong += differences(name, expected, found)
        if isinstance(term, ShardedProduct) and comms.get_total_counts():
            wrong.append(f"{name} communicates")
    return wrong


def test_placements_of_products_are_those_of_dtensor(fresh_pool: WorkerPool) -> None:
    assert [[], []] == fresh_pool.run(2, check_rule)


def run_hooks(world: Any) -> list[str]:
    """What is wrong with hooks of DTensor parameters."""
    mesh = DeviceMesh.from_group(world, "cpu")
    case = ON_TWO["columns, then rows"]
    reference, module = same_twice(case, mesh)
    seen: list[list[Any]] = [[], []]
    for own, notes in zip((reference, module), seen, strict=True):
        own.up.weight.register_hook(lambda grad: grad * 2)
        own.down.weight.register_post_accumulate_grad_hook(
            lambda param, notes=notes: notes.append((param.grad.placements, param.grad.to_local()))
        )
    engine = SplitEngine(module)
    for values in microbatches(case):
        reference(values.clone().requires_grad_()).sum().backward()
        forward = engine.forward(values.clone().requires_grad_())
        _, weights = forward.backward_input(loss=forward.outputs.sum())
        weights.run()
    expected, found = ([(placements, local.tolist()) for placements, local in s] for s in seen)
    wrong = [] if expected == found and len(found) == NUM_MICROBATCHES else ["hooks saw others"]
    return wrong + compare(reference, module)


def test_hooks_of_parameters_run_in_w(fresh_pool: WorkerPool) -> None:
    assert [[], []] == fresh_pool.run(2, run_hooks)


def overwrite(world: Any, what: str) -> str:
    """What is said if the input of a layer is overwritten before its product is computed."""
    mesh = DeviceMesh.from_group(world, "cpu")
    inputs: list[Tensor] = []
    layer = placed([Shard(0)], [Replicate()])(mesh).double()
    layer.linear.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    engine = SplitEngine(layer)
    forward = engine.forward(torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True) * 1)
    (x,) = inputs

    @torch.no_grad()
    def change() -> None:
        (x.to_local() if "shard" in what else x).mul_(2)

    try:
        if "forward" in what:
            change()
        _, weights = forward.backward_input(torch.ones_like(forward.outputs))
        change()
        weights.run()
    except BackwardError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "what", ["DTensor after forward", "shard after forward", "DTensor", "shard"]
)
def test_activation_that_is_overwritten_is_noticed(what: str, fresh_pool: WorkerPool) -> None:
    after = "forward" if "forward" in what else "input backward"
    for said in fresh_pool.run(2, overwrite, what):
        assert f"was modified in place after the {after}" in said


def train_sharded(world: Any, schedule: str) -> tuple[dict[str, Tensor], int]:
    """The gradients of two stages that FSDP2 shards over one dimension and TP over the other, and
    the number of products that their weight backwards computed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "tensor"))
    own = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    modules = []
    for module in two_stages():
        parallelize_module(module.inner, mesh["tensor"], dict(COLUMNS_THEN_ROWS))
        modules.append(fully_shard(module, mesh=mesh["replicas"]))
    stages = make_stages(own, modules, [0, 1])
    pipeline = Pipeline(stages, schedule, num_microbatches=2, loss_fn=mean_square)
    x, target = (both.chunk(2)[mesh.get_local_rank("replicas")] for both in batch())
    with count_products() as products:
        pipeline.step(x, target=target)
    grads = {}
    for number, module in enumerate(modules):
        for name, param in module.named_parameters():
            grads[f"{number}.{name}"] = param.grad.full_tensor()
    return grads, len(products)


@contextmanager
def count_products() -> Iterator[list[ShardedProduct]]:
    found: list[ShardedProduct] = []
    original = ShardedProduct.value

    def value(self: ShardedProduct) -> Tensor:
        found.append(self)
        return original(self)

    ShardedProduct.value = value  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ShardedProduct.value = original  # type: ignore[method-assign]


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp().double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


def two_stages() -> list[Stage]:
    torch.manual_seed(0)
    return [Stage(), Stage()]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, target = torch.randn(2, 8, WIDTH).double()
    return x, target


def test_fsdp_and_tensor_parallelism_together(fresh_pool: WorkerPool) -> None:
    model = nn.Sequential(*two_stages())
    x, target = batch()
    mean_square(model(x), target).backward()
    for grads, num_products in fresh_pool.run(4, train_sharded, "ZB-V"):
        for name, param in model.named_parameters():
            assert_close(name, param.grad, grads[name])
        # All layers but the first, whose input needs no gradient, for each microbatch.
        assert 2 * 3 == num_products

"""Pipelines of stages that are compiled, in whole or in part."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from interpreted_code import INTERPRETED, interpret
from local_steps import FOUR_STAGES, assert_same, mlp, mlp_batch, step_locally, step_unsplit
from penstock.backward import SplitEngine
from penstock.backward.wrappers import is_compiled
from penstock.compiling.split_backend import SplitBackend
from penstock.errors import StageError
from penstock.ir import Schedule
from penstock.torch_private.compiler import compile_in_place

# torch's compiler causes it itself, where a module is given a tensor that is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WIDTH = 6


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Let torch forget what it has compiled, before it refuses to compile more."""
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("schedule", FOUR_STAGES.values(), ids=FOUR_STAGES)
def test_compiled_stages_train_as_the_whole_model(schedule: Schedule) -> None:
    modules, batch = mlp(), mlp_batch()
    expected = step_unsplit(modules, batch)
    for module in modules:
        module.compile(backend=INTERPRETED)
    assert_same(expected, step_locally(modules, schedule, batch))


def test_stage_in_which_some_parts_are_compiled_trains_as_the_whole_model() -> None:
    modules = [nn.Sequential(*mlp(3)) for _ in range(4)]
    batch = mlp_batch()
    expected = step_unsplit(modules, batch)
    for module in modules:
        module[1].compile(backend=INTERPRETED)
    assert_same(expected, step_locally(modules, FOUR_STAGES["ZB-V"], batch))


class Attention(nn.Module):
    """Layers around attention that is compiled by itself, as for a mask."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.attend = torch.compile(functional.scaled_dot_product_attention, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(self.attend(q, k, v))  # type: ignore[no-any-return]  # torch's


@pytest.mark.parametrize("backend", ["aot_eager", INTERPRETED], ids=["torch's", "ours"])
def test_layers_around_a_compiled_function_still_wait(backend: Any) -> None:
    module = Attention(backend).double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    _, pending = SplitEngine(module).forward(x).backward_input(grad)
    # What waits is each layer's input, and the gradient of its output.
    assert 4 == len(pending.held)
    pending.run()
    found = [param.grad for param in module.parameters()]
    module.zero_grad()
    module.attend = functional.scaled_dot_product_attention
    module(x.detach().requires_grad_()).backward(grad)
    torch.testing.assert_close([param.grad for param in module.parameters()], found)


class CallsInside(nn.Module):
    """A module that calls a layer of its own in a function that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

        def call(x: Tensor) -> Tensor:
            return functional.gelu(self.layer(x))

        self.call = torch.compile(call, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(x)  # type: ignore[no-any-return]  # torch's


def test_layer_that_is_called_in_a_compiled_function_keeps_its_own_forward() -> None:
    """The engine's forward of a layer leaves a tap, which compiled code cannot do."""
    module = CallsInside().double()
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    engine = SplitEngine(module)
    for _ in range(2):
        module.zero_grad()
        (found,), pending = engine.forward(x).backward_input(torch.ones(4, WIDTH).double())
        pending.run()
    grads = [param.grad for param in module.parameters()]
    module.zero_grad()
    other = x.detach().requires_grad_()
    (other + functional.gelu(module.layer(other))).backward(torch.ones(4, WIDTH).double())
    torch.testing.assert_close(found, other.grad)
    torch.testing.assert_close(grads, [param.grad for param in module.parameters()])


def test_compile_option_compiles_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    num_graphs = 0

    def counting(*args: Any, **details: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return interpret(*args, **details)

    monkeypatch.setattr(
        "penstock.compiling.split_backend.SplitBackend",
        lambda *options: SplitBackend(*options, counting),
    )
    # torch's own modules are compiled too, which module.compile() would leave as they are.
    modules: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(4)
    ]
    batch = mlp_batch()
    expected = step_unsplit(modules, batch)
    found = step_locally(modules, FOUR_STAGES["ZB-V"], batch, compile=True)
    assert num_graphs > 0
    assert all(map(is_compiled, modules))
    assert_same(expected, found)


def test_compile_option_refuses_stages_that_are_compiled() -> None:
    modules = mlp()
    modules[1].compile(backend="eager")
    expected = (
        "compile is True, but a part of stage 1 on rank 1 is compiled already. Expected stages "
        "without compiled parts. Leave compile out, or pass modules that are not compiled."
    )
    with pytest.raises(StageError, match=re.escape(expected)):
        step_locally(modules, FOUR_STAGES["1F1B"], mlp_batch(), compile=True)


def test_gradient_that_a_forward_takes_itself_is_whole() -> None:
    """A split one would leave its weight half to the stage's own weight backward."""

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 1)).double()
            self.out = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            inner = x.detach().requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.score(inner).sum(), inner)
            return self.out(x + slope)  # type: ignore[no-any-return]  # untyped

    module = Scored()
    compile_in_place(module.score, backend=INTERPRETED)
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    _, pending = SplitEngine(module).forward(x).backward_input(torch.ones(4, WIDTH).double())
    pending.run()
    assert module.score[0].weight.grad is None
    found = module.out.weight.grad
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(module.out.weight.grad, found)


def test_compiled_stages_can_be_measured() -> None:
    modules, batch = mlp(1), mlp_batch()
    modules[0].compile(backend=INTERPRETED)

    def main(group: penstock.LocalGroup) -> penstock.CostTable:
        stage = penstock.PipelineStage(modules[0], 0, 1, "cpu", group=group)
        x = batch.args[0].detach().requires_grad_()
        loss_fn = nn.functional.mse_loss
        return penstock.measure_costs([stage], 4, loss_fn, x, target=batch.target)

    (costs,) = penstock.local_ranks(1, main)
    assert costs.backward_weight[0] > 0
    assert 0 < costs.after_input[0]

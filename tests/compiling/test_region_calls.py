"""Calls of compiled regions: whose backward runs, in which order, and what a failure leaves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpreted_code import INTERPRETED
from penstock.backward import SplitEngine
from penstock.errors import BackwardError

# torch's compiler causes it itself, where a module is given a tensor that is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WIDTH = 4


class Passing(nn.Module):
    """A module that also returns a view of its input, which another region made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.layer(x)), x.view(x.shape)


class Chain(nn.Module):
    def __init__(self, *modules: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for part in self.parts:
                first, second = part(x)
                x = first + second
        return x


def compiled(module: nn.Module) -> nn.Module:
    module.compile(backend=INTERPRETED, dynamic=False)
    return module


def grads_of(module: nn.Module) -> list[Any]:
    found = [param.grad for param in module.parameters()]
    module.zero_grad()
    return found


def split_once(module: nn.Module, x: Tensor, grad: Tensor) -> None:
    _, weights = SplitEngine(module).forward(x).backward_input(grad)
    weights.run()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH)


def assert_split_like_whole(module: nn.Module) -> None:
    for seed in range(5):
        x, _ = data()
        torch.manual_seed(seed)
        grad = torch.randn(3, WIDTH)
        for _ in range(2):  # The second time, the sum is added to a gradient that is there.
            module(x).backward(grad)
        expected = grads_of(module)
        for _ in range(2):
            split_once(module, x, grad)
        assert all(map(torch.equal, expected, grads_of(module)))


def test_call_that_returns_a_view_of_its_input_is_told_from_the_call_that_made_it() -> None:
    torch._dynamo.reset()
    module = Chain(compiled(Passing()), compiled(Passing()), compiled(Passing()))
    x, grad = data()
    module(x).backward(grad)
    expected = grads_of(module)
    split_once(module, x, grad)
    assert all(map(torch.equal, expected, grads_of(module)))


def test_uses_of_one_weight_are_added_in_the_order_of_autograd() -> None:
    torch._dynamo.reset()
    module = Chain(compiled(Passing()), times=5)
    assert_split_like_whole(module)


class Again(nn.Module):
    """Runs the layer of another module, uncompiled."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


def test_uses_of_a_weight_inside_and_outside_of_regions_are_added_in_the_order_of_autograd() -> (
    None
):
    torch._dynamo.reset()
    inside = compiled(Passing())
    module = Chain(inside, Again(inside.layer))
    assert_split_like_whole(module)


def test_backward_after_one_that_failed_gives_all_gradients() -> None:
    """The region was told of a call whose backward then did not run."""
    torch._dynamo.reset()
    module = compiled(Passing())
    x, grad = data()

    def fail(_: object) -> None:
        raise ZeroDivisionError("in a hook")

    pending = SplitEngine(module).forward(x)
    pending.outputs[0].grad_fn.register_prehook(fail)
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        pending.backward_input((grad, None))
    module(x)[0].backward(grad)
    assert all(found is not None for found in grads_of(module))


def test_whole_backward_of_a_stage_whose_input_needs_no_gradient_waits() -> None:
    torch._dynamo.reset()
    module = Chain(compiled(Passing()), compiled(Passing()))
    x, grad = data()
    x = x.detach()
    module(x).backward(grad)
    expected = grads_of(module)
    _, weights = SplitEngine(module).forward(x).backward_input(grad)
    assert all(found is None for found in grads_of(module))
    weights.run()
    assert all(map(torch.equal, expected, grads_of(module)))


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x) @ y


def test_parameter_that_is_an_input_gets_its_gradient_as_an_input() -> None:
    torch._dynamo.reset()
    module, (x, _) = compiled(Sum()), data()
    y = nn.Parameter(torch.randn(WIDTH, 2))
    grads, weights = SplitEngine(module).forward(x, y).backward_input(torch.ones(3, 2))
    weights.run()
    assert y.grad is None
    assert all(grad is not None for grad in (*grads, *grads_of(module)))


class Scaled(nn.Module):
    """Multiplies by a weight that another weight scales, of which it uses the value alone."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ (self.weight * self.scale.detach()), x


class Scaling(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x) @ self.scale, x


@pytest.mark.parametrize("times", [1, 2], ids=["apart", "used twice"])
def test_hook_that_changes_a_weight_that_another_half_needs_is_refused(times: int) -> None:
    """An optimizer in the backward steps a weight before a region is done with its value."""
    scale = nn.Parameter(torch.randn(WIDTH, WIDTH))
    parts = compiled(Scaled(scale)), compiled(Scaling(scale))

    def step(param: Tensor) -> None:
        param.detach().sub_(param.grad, alpha=0.1)

    scale.register_post_accumulate_grad_hook(step)
    forward = SplitEngine(Chain(*parts, times=times)).forward(
        torch.randn(3, WIDTH, requires_grad=True)
    )
    with pytest.raises(BackwardError, match="modified in place after the input backward"):
        forward.backward(torch.ones(3, WIDTH))

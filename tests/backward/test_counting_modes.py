"""Modes that count operations or collectives follow modules by multi-grad hooks on their inputs.

Such a hook on a leaf fails in a pass that is asked for the leaf's gradient, as every I is.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode

from penstock.backward import SplitEngine, stage_backward_input
from penstock.errors import BackwardError

MODES = pytest.mark.parametrize(
    "mode", [lambda: FlopCounterMode(display=False), CommDebugMode], ids=["flops", "collectives"]
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor, others: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.norm(self.linear(x) + others["y"])
        return y


def make() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    return Net(), x, y


@MODES
def test_halves_run_in_a_mode(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    reference, x, y = make()
    reference(x, {"y": y}).square().sum().backward()
    net, a, b = make()
    engine = SplitEngine(net)
    with mode():
        forward = engine.forward(a, {"y": b})
        grads, weights = forward.backward_input(loss=forward.outputs.square().sum())
        weights.run()
    assert [id(a), id(b)] == [id(value) for value in forward.inputs]
    for leaf, grad in zip((x, y), grads, strict=True):
        assert torch.equal(leaf.grad, grad)
    for expected, found in zip(reference.parameters(), net.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_operations_are_those_of_the_full_backward() -> None:
    net, x, y = make()
    with FlopCounterMode(display=False) as full:
        net(x, {"y": y}).sum().backward()
    with FlopCounterMode(display=False) as halves:
        forward = SplitEngine(net).forward(x, {"y": y})
        forward.backward(loss=forward.outputs.sum())
    assert full.get_total_flops() == halves.get_total_flops() > 0


@MODES
def test_functions_say_how_to_call_the_module_in_a_mode(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    net, x, y = make()
    with mode(), pytest.raises(BackwardError, match=r"call the module with x\.view_as\(x\)"):
        stage_backward_input([net(x, {"y": y}).sum()], None, [x, y], net.parameters())
    net, x, y = make()
    with mode():
        loss = net(x.view_as(x), {"y": y.view_as(y)}).sum()
        (grad, _), _ = stage_backward_input([loss], None, [x, y], net.parameters())
    assert grad is not None

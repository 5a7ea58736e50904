"""The halves that inductor compiles give what its whole backward gives, to the last bit.

Compiling takes seconds, so one case runs here; `make fuzz` runs all.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock
from fuzzing import IS_LONG
from penstock.backward import SplitEngine

WIDTH = 16


class Block(nn.Module):
    """A norm, attention and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + functional.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        return x + self.down(functional.gelu(self.up(x)))


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.3)


class CheckpointedInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.attend, x, use_reentrant=False)
        return x + self.down(functional.gelu(self.up(x)))


class Broken(Block):
    """A graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        torch._dynamo.graph_break()
        return x + self.down(functional.gelu(self.up(x)))


class Twice(Block):
    """A weight that is used twice, and two outputs."""

    def forward(self, x: Tensor) -> Any:
        y = self.down(functional.gelu(self.up(x)))
        return y, self.down(functional.silu(self.up(y)))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 5, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]  # a module's forward is untyped


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ((2, 5, WIDTH), (2, 5, WIDTH))
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


CASES = {
    "a block": Case(Block),
    "dropout": Case(Dropping),
    "checkpointed inside": Case(CheckpointedInside),
    "graph break": Case(Broken),
    "a weight used twice, two outputs": Case(Twice),
    "convolutions and a norm with buffers": Case(Convolution),
    "other shapes": Case(Block, shapes=((2, 5, WIDTH), (3, 7, WIDTH), (4, 5, WIDTH))),
    "dynamic shapes": Case(Block, {"dynamic": True}, ((2, 5, WIDTH), (3, 7, WIDTH))),
    "no memory for activations": Case(Block, {"memory_budget": 0}),
    "autocast": Case(Block, context=lambda: torch.autocast("cpu", torch.bfloat16)),
}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CASES if IS_LONG else ["a block"])
@pytest.mark.filterwarnings("ignore")  # torch warns of itself.
def test_halves_of_inductor_equal_its_whole_backward(name: str) -> None:
    case, grads = CASES[name], []
    for is_split in (True, False):
        torch.compiler.reset()
        torch.manual_seed(0)
        module = case.build()
        compiled = penstock.compile(module, **case.options)
        engine = SplitEngine(compiled)
        found: list[Tensor | None] = []
        for shape in case.shapes:
            x = torch.randn(shape, requires_grad=True)
            with case.context():
                pending = engine.forward(x) if is_split else None
                outputs = compiled(x) if pending is None else pending.outputs
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            seeds = [torch.randn_like(output) for output in outputs]
            if pending is None:
                torch.autograd.backward(outputs, seeds)
                found.append(x.grad)
            else:
                given = seeds if len(seeds) > 1 else seeds[0]
                (dx,), weights = pending.backward_input(given)
                assert weights.held
                weights.run()
                found.append(dx)
        grads.append([*found, *(param.grad for param in module.parameters())])
    for split, whole in zip(*grads, strict=True):
        assert (split is None) == (whole is None)
        assert split is None or whole is None or torch.equal(split, whole)

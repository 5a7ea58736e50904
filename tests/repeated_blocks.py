"""Modules that compute something else in a second forward, unless it begins as the first did."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from local_steps import WIDTH


class Block(nn.Module):
    """A residual block around what a case computes with a layer."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.function = function
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.function(self, x, **kwargs)


def normed(block: Block, x: Tensor) -> Tensor:
    y: Tensor = block.parts[0](block.layer(x)).tanh()
    return x + y


def counting(block: Block, x: Tensor) -> Tensor:
    """It depends on a buffer that it changes, and on an attribute that it sets."""
    with torch.no_grad():
        block.count += 1
    block.calls += 1
    return x + block.layer(x) * block.count.clone() + block.calls


def replacing(block: Block, x: Tensor) -> Tensor:
    """It puts another tensor in the place of a buffer."""
    block.count = block.count + 1
    return x + block.layer(x) * block.count


def remembering(block: Block, x: Tensor) -> Tensor:
    """It keeps a tensor with its graph until the next call, which reads its values."""
    y: Tensor = block.layer(x)
    last = getattr(block, "last", None)
    block.last = y
    return x + y if last is None else x + y * last.detach()


def drawing_elsewhere(block: Block, x: Tensor) -> Tensor:
    generator = block.__dict__.setdefault("generator", torch.Generator().manual_seed(0))
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    return x + block.layer(x) * (noise + random.random() + np.random.rand())


def in_place(block: Block, x: Tensor, mask: Tensor) -> Tensor:
    """It changes an input that needs no gradient."""
    mask.mul_(0.5).add_(1)
    return x + block.layer(x) * mask.clone()


def popping(block: Block, x: Tensor, scales: list[Tensor]) -> Tensor:
    """It empties a list that it was given."""
    return x + block.layer(x) * scales.pop()


def checkpointed(block: Block, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(
        lambda value: functional.dropout(block.layer(value).tanh()), x, use_reentrant=False
    )
    return x + y


def view(block: Block, x: Tensor) -> Tensor:
    return block.layer(torch.cat([x, x])).tanh()[: x.shape[0]]


def unchanged(block: Block, x: Tensor) -> Tensor:
    return x


def autocast_inside(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y: Tensor = block.layer(x.float())
    return x + y.to(x.dtype)


BLOCKS: dict[str, Callable[[], Block]] = {
    "dropout": lambda: Block(normed, nn.Dropout(0.5)),
    "batch norm": lambda: Block(normed, nn.BatchNorm1d(WIDTH)),
    "spectral norm": lambda: Block(
        normed, torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    ),
    "counting": lambda: Block(counting),
    "replacing": lambda: Block(replacing),
    "remembering": lambda: Block(remembering),
    "drawing elsewhere": lambda: Block(drawing_elsewhere),
    "checkpointed": lambda: Block(checkpointed),
    "view": lambda: Block(view),
    "unchanged": lambda: Block(unchanged),
}

"""A model with the kinds of outputs and state that a traced pipe has to give as torch's does."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, WORDS, LENGTH = 4, 7, 3
CUT_AT = "layers.2"
KINDS = ("tensor", "tuple", "dict", "object", "from the middle", "twice", "with None", "the input")


@dataclass
class Outputs:
    """Outputs in a class of the model's own, as transformers has them."""

    logits: Tensor
    hidden: Tensor


torch.export.register_dataclass(Outputs, serialized_type_name="pipe_models.Outputs")


class Net(nn.Module):
    """Its head is tied to its embedding, and one of its buffers is not saved."""

    def __init__(self, kind: str = "tensor") -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("unsaved", torch.rand(WIDTH), persistent=False)
        self.register_buffer("saved", torch.rand(WIDTH))

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Any:
        h = self.embed(x) * self.unsaved + self.saved * scale
        h = middle = self.layers[1](torch.tanh(self.layers[0](h)))
        h = self.dropout(self.layers[3](torch.tanh(self.layers[2](h))))
        out = self.head(h)
        if shift is not None:
            out = out + shift
        return {
            "tensor": out,
            "tuple": (out, h),
            "dict": {"out": out, "more": [h]},
            "object": Outputs(out, h),
            "from the middle": (middle, out),
            "twice": (out, out),
            "with None": (out, None),
            "the input": (out, x),
        }[self.kind]


def make_net(kind: str = "tensor") -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(kind).eval()


def make_inputs(size: int = 2) -> tuple[Tensor, Tensor]:
    x = torch.arange(size * LENGTH).reshape(size, LENGTH) % WORDS
    return x, torch.linspace(1, 2, WIDTH)

"""Models with layers in lists, for cuts between layers; most of them cannot be traced."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cut_training import NUM_MICROBATCHES, ROWS

WIDTH, VOCABULARY, LENGTH, LAYERS = 4, 7, 3, 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Layers(nn.Module):
    """Layers in a list, between an embedding and a head; each model below does more."""

    def __init__(self, make_layer: Callable[[], nn.Module] = linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(make_layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Doubled(torch.autograd.Function):
    """An identity whose backward is not its derivative, so a trace would lose it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Doubled.apply(self.linear(x))
        return torch.tanh(out)


class Tied(Layers):
    """The head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Experts(nn.Module):
    """The values of tokens decide which expert they take, in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(linear() for _ in range(2))
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = chosen == number
            out[rows] = self.experts[number](x[rows]) * best[rows, None]
        return x + out


class Masked(Layers):
    """A mask and positions that every stage computes itself, and a bias that travels."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("positions", torch.arange(LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = (tokens > 1).unsqueeze(-1) * torch.ones_like(x) + x.new_zeros(x.shape)
        bias = self.bias(self.positions[: tokens.shape[1]])
        for layer in self.layers:
            x = Mixing.mixed(layer, x * mask, bias)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Mixing(nn.Module):
    """A layer that takes a bias too, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.tanh(self.linear(x) + bias)

    @staticmethod
    def mixed(layer: nn.Module, x: Tensor, bias: Tensor) -> Any:
        return layer(x, bias=bias)


class Biased(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixing() for _ in range(LAYERS))


class Checkpointed(Layers):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Changing(Layers):
    """It changes its input in place, which all stages are given."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens.add_(1).remainder_(VOCABULARY)
        return super().forward(tokens)


class Shelf(Layers):
    """The layers put values for later ones into a dict."""

    def __init__(self) -> None:
        super().__init__(Shelving)

    def forward(self, tokens: Tensor) -> Tensor:
        x, shelf = self.embed(tokens), dict[str, Tensor]()
        for layer in self.layers:
            x = layer(x, shelf)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Shelving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, shelf: dict[str, Tensor]) -> Tensor:
        if "first" not in shelf:
            shelf["first"] = x.sin()
        return torch.tanh(self.linear(x) * shelf["first"])


class Appending(Layers):
    """The layers append to a list, and use its first value and its length."""

    def __init__(self) -> None:
        super().__init__(Counting)

    def forward(self, tokens: Tensor) -> Tensor:
        x, seen = self.embed(tokens), list[Tensor]()
        for layer in self.layers:
            x = layer(x, seen)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x.sin())
        return torch.tanh(self.linear(x) * seen[0] * len(seen))


class Doubling(nn.Module):
    """A layer that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mul_(2))
        return out


class Listed(Layers):
    """It returns the values between its layers too, which different stages compute."""

    def forward(self, tokens: Tensor) -> Any:
        values = [self.embed(tokens)]
        for layer in self.layers:
            values.append(layer(values[-1]).sin())
        logits = self.head(self.norm(values[-1]))
        return {"logits": logits, "values": values}


class Translator(nn.Module):
    """An encoder, and a decoder whose layers all take the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(OwnBackward() for _ in range(2))
        self.decoder = nn.ModuleList(Mixing() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        memory = self.embed(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed(targets)
        for layer in self.decoder:
            x = layer(x, bias=memory)
        return {"logits": self.head(x), "memory": memory}


def own_backwards() -> Layers:
    return Layers(OwnBackward)


def in_place() -> Layers:
    return Layers(Doubling)


def experts() -> Layers:
    return Layers(Experts)


def some_tokens() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS * NUM_MICROBATCHES, LENGTH))


def loss_of(output: Any, target: Tensor) -> Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

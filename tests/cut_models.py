"""Whole models, as users write them, and where to cut them into 2, 4 or 8 stages.

Each has eight layers, float64 numbers, and something that makes it hard to cut.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import SplitPoint, pipe_split
from staged_models import Batch

WIDTH = 4
VOCABULARY = 7
LENGTH = 3
NUM_LAYERS = 8


class CutModel(NamedTuple):
    """How to make a model, a batch and a loss, and the cuts for a number of stages."""

    make_model: Callable[[int], nn.Module]
    make_batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], Tensor]
    find_cuts: Callable[[int], dict[str, SplitPoint]]

    def model(self, num_stages: int) -> nn.Module:
        """The same model with the same parameters, whoever makes it."""
        with torch.random.fork_rng():
            torch.manual_seed(100)
            return self.make_model(num_stages).double()

    def batch(self, size: int, step: int) -> Batch:
        with torch.random.fork_rng():
            torch.manual_seed(step)
            return self.make_batch(size)


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _layers(make: Callable[[], nn.Module] = _linear) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(NUM_LAYERS))


class MultiUse(nn.Module):
    """Parameters of its own, used beside the layers: one by all stages, one by first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()
        self.mixture = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        for layer in self.layers:
            h = torch.tanh(layer(h)) + torch.sin(h @ self.mixture)
        return h * self.scale


class SkipOne(nn.Module):
    """Each layer gets what came out of the fourth before it: over one of four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for number, layer in enumerate(self.layers):
            skipped = values[max(number - 4, 0)]
            values.append(torch.tanh(layer(values[-1])) + 0.5 * skipped)
        return values[-1]


class SkipMany(nn.Module):
    """One value is used by all layers, one by the last alone, one only as the condition of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = _layers()

    def forward(self, x: Tensor) -> Tensor:
        everywhere = self.first(x)
        is_positive = everywhere > 0
        h = first = torch.tanh(self.layers[0](everywhere))
        for layer in self.layers[1:]:
            h = torch.sin(layer(h)) + everywhere
        return torch.where(is_positive, h * first, h)


class TiedHead(nn.Module):
    """The embedding's weight is the head's too: one parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = _layers()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)


class Aliased(nn.Module):
    """Layers that share a parameter: neighbours in one stage, and others in two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()
        self.layers[1].weight = self.layers[0].weight
        self.layers[7].bias = self.layers[2].bias
        self.layers[6].weight = self.layers[3].weight
        self.again = self.layers[5]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.5 * x
        return functional.linear(x, self.again.weight)


class Keywords(nn.Module):
    """Keyword arguments: a mask that only late layers use, tensors in a dict, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()

    def forward(
        self, x: Tensor, *, mask: Tensor, extra: dict[str, Tensor], is_scaled: bool
    ) -> Tensor:
        h = x * extra["scale"] if is_scaled else x
        for number, layer in enumerate(self.layers):
            h = torch.tanh(layer(h))
            if number >= 6:
                h = torch.where(mask, h, x)
        return h + extra["shift"]


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Norms that count and average, a ReLU in place after each cut, and a buffer for all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(ConvBlock)
        self.head = nn.Linear(2, 3)
        self.register_buffer("ramp", torch.linspace(0.5, 1.5, 4), persistent=False)
        self.register_buffer("offset", torch.full((2, 1, 1), 0.1))

    def forward(self, x: Tensor, *, pooling: str) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.ramp + self.offset
        pooled = x.mean((2, 3)) if pooling == "mean" else x.amax((2, 3))
        return self.head(pooled)


class EncoderDecoder(nn.Module):
    """The decoder's layers attend to what the encoder gives, all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        options = {"dropout": 0.0, "batch_first": True}
        make_encoder = partial(nn.TransformerEncoderLayer, WIDTH, 2, WIDTH, **options)
        make_decoder = partial(nn.TransformerDecoderLayer, WIDTH, 2, WIDTH, **options)
        half = NUM_LAYERS // 2
        self.encoder = nn.ModuleList(make_encoder() for _ in range(half))
        self.decoder = nn.ModuleList(make_decoder() for _ in range(half))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        h = self.embed(tokens)
        for layer in self.decoder:
            h = layer(h, memory)
        return self.head(h)


class Marked(nn.Module):
    """Says itself where it is to be cut, in the middle of its layers' work."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.layers = _layers()
        self.starts = range(0, NUM_LAYERS, NUM_LAYERS // num_stages)[1:]

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            h = layer(x)
            if number in self.starts:
                pipe_split()
            x = x + torch.tanh(h)
        return x


class Repeated(nn.Module):
    """One block is called after each layer, so that every stage has a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.block(torch.tanh(layer(x)))
        return x


class Result(NamedTuple):
    early: Tensor
    late: dict[str, Any]


class Nested(nn.Module):
    """Gives values of early and late layers; has frozen parameters, and ones that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()
        self.layers[1].requires_grad_(False)
        self.layers[6].weight.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 2)
        self.layers[4].extra = nn.Parameter(torch.zeros(3))
        self.register_buffer("spare", torch.arange(3))
        self.side = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Result:
        values = [x]
        for layer in self.layers:
            values.append(torch.tanh(layer(values[-1])) + 0.5 * values[-1])
        side = self.side(values[3])
        return Result(values[1], {"last": values[-1], "pair": (side, values[-1].argmax(-1))})


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _vectors(size: int) -> Batch:
    return Batch((_randn(size, WIDTH),), {}, _randn(size, WIDTH))


def _tokens(size: int) -> Batch:
    tokens, target = torch.randint(VOCABULARY, (2, size, LENGTH))
    return Batch((tokens,), {}, target)


def _two_sequences(size: int) -> Batch:
    tokens, target = torch.randint(VOCABULARY, (2, size, LENGTH))
    return Batch((torch.randint(VOCABULARY, (size, LENGTH + 2)), tokens), {}, target)


def _images(size: int) -> Batch:
    return Batch((_randn(size, 2, 4, 4),), {"pooling": "mean"}, torch.randint(3, (size,)))


def _with_keywords(size: int) -> Batch:
    extra = {"scale": _randn(size, 1), "shift": _randn(size, WIDTH)}
    kwargs = {"mask": torch.rand(size, WIDTH) > 0.3, "extra": extra, "is_scaled": True}
    return Batch((_randn(size, WIDTH),), kwargs, _randn(size, WIDTH))


def _cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), target.flatten())


def _nested_loss(outputs: Result, target: Tensor) -> Tensor:
    side, _ = outputs.late["pair"]
    late = functional.mse_loss(outputs.late["last"], target)
    return late + outputs.early.square().mean() + side.sin().mean()


def _after_layers(num_stages: int) -> dict[str, SplitPoint]:
    ends = range(0, NUM_LAYERS, NUM_LAYERS // num_stages)[1:]
    return {f"layers.{end - 1}": SplitPoint.END for end in ends}


def _before_relus(num_stages: int) -> dict[str, SplitPoint]:
    starts = range(0, NUM_LAYERS, NUM_LAYERS // num_stages)[1:]
    return {f"layers.{start}.relu": SplitPoint.BEGINNING for start in starts}


def _in_both_halves(num_stages: int) -> dict[str, SplitPoint]:
    half = NUM_LAYERS // 2
    starts = range(0, NUM_LAYERS, NUM_LAYERS // num_stages)[1:]
    names = [f"encoder.{i}" if i < half else f"decoder.{i - half}" for i in starts]
    return dict.fromkeys(names, SplitPoint.BEGINNING)


def _plain(make: Callable[[], nn.Module]) -> CutModel:
    """A model that maps vectors to vectors."""
    return CutModel(lambda _: make(), _vectors, functional.mse_loss, _after_layers)


CUT_MODELS: Mapping[str, CutModel] = {
    "multi-use": _plain(MultiUse),
    "skip-one": _plain(SkipOne),
    "skip-many": _plain(SkipMany),
    "tied-head": CutModel(lambda _: TiedHead(), _tokens, _cross_entropy, _after_layers),
    "aliased": _plain(Aliased),
    "keywords": _plain(Keywords)._replace(make_batch=_with_keywords),
    "conv": CutModel(lambda _: ConvNet(), _images, _cross_entropy, _before_relus),
    "encoder-decoder": CutModel(
        lambda _: EncoderDecoder(), _two_sequences, _cross_entropy, _in_both_halves
    ),
    "marked": CutModel(Marked, _vectors, functional.mse_loss, lambda _: {}),
    "repeated": _plain(Repeated),
    "nested": _plain(Nested)._replace(loss=_nested_loss),
}

"""Pieces of random networks: small frozen descriptions, and the modules they stand for.

Every piece maps (batch, tokens, width) to the same shape, so any list of pieces is a
network. `others` carries the stage's further inputs past the pieces that ignore them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

BATCH, TOKENS, WIDTH = 2, 3, 4

Others: TypeAlias = dict[str, Tensor]


class Op(nn.Module):
    """A function of x, its own parameters and the other inputs, as a module."""

    def __init__(self, function: Callable[..., Tensor], *shapes: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        self.params = nn.ParameterList(
            [nn.Parameter(torch.randn(tuple(shape))) for shape in shapes]
        )

    def forward(self, x: Tensor, others: Others) -> Tensor:
        return self.function(x, *self.params)


class Wrapped(nn.Module):
    """Modules of torch's own, called by a function of x and the modules."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.wrapped = nn.ModuleList(modules)

    def forward(self, x: Tensor, others: Others) -> Tensor:
        return self.function(x, *self.wrapped)


class Chain(nn.Module):
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.links = nn.ModuleList(modules)

    def forward(self, x: Tensor, others: Others) -> Tensor:
        for link in self.links:
            x = link(x, others)
        return x


class Workshop:
    """What has been built so far, for the pieces that use it a second time."""

    def __init__(self) -> None:
        self.linears: list[nn.Module] = []
        self.pieces: list[nn.Module] = []

    def build(self, piece: "Piece") -> nn.Module:
        module = piece.build(self)
        self.pieces.append(module)
        return module

    def linear(self, of: int) -> nn.Module | None:
        return self.linears[of % len(self.linears)] if self.linears else None


@dataclass(frozen=True)
class Linear:
    bias: bool = True
    is_flat: bool = False
    frozen: Literal["", "weight", "bias"] = ""
    relu_in_place: bool = False
    is_hooked: bool = False

    def build(self, workshop: Workshop) -> nn.Module:
        linear = nn.Linear(WIDTH, WIDTH, bias=self.bias)
        linear.weight.requires_grad_(self.frozen != "weight")
        if linear.bias is not None:
            linear.bias.requires_grad_(self.frozen != "bias")
        workshop.linears.append(linear)

        def run(x: Tensor, linear: nn.Module) -> Tensor:
            y: Tensor = linear(x.reshape(-1, WIDTH) if self.is_flat else x)
            if self.is_hooked:
                _double_grad(y)
            if self.relu_in_place:
                y = F.relu(y, inplace=True)
            return y.view(BATCH, TOKENS, WIDTH)

        return Wrapped(run, linear)


@dataclass(frozen=True)
class Conv:
    bias: bool = True
    groups: Literal[1, 2] = 1

    def build(self, workshop: Workshop) -> nn.Module:
        conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=self.groups, bias=self.bias)
        return Wrapped(lambda x, conv: conv(x.mT).mT, conv)


@dataclass(frozen=True)
class Norm:
    kind: Literal["layer", "rms", "group", "batch"] = "layer"

    def build(self, workshop: Workshop) -> nn.Module:
        match self.kind:
            case "layer":
                return Wrapped(lambda x, norm: norm(x), nn.LayerNorm(WIDTH))
            case "rms":
                return Wrapped(lambda x, norm: norm(x), nn.RMSNorm(WIDTH))
            case "group":
                return Wrapped(lambda x, norm: norm(x.mT).mT, nn.GroupNorm(2, WIDTH))
            case "batch":
                return Wrapped(lambda x, norm: norm(x.mT).mT, nn.BatchNorm1d(WIDTH))


@dataclass(frozen=True)
class Pointwise:
    kind: Literal["relu", "gelu", "tanh"] = "relu"

    def build(self, workshop: Workshop) -> nn.Module:
        return Op({"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh}[self.kind])


_RAW: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "x @ w": (lambda x, w: x @ w, [(WIDTH, WIDTH)]),
    "w @ x": (lambda x, w: w @ x, [(TOKENS, TOKENS)]),
    "x[0] @ w": (lambda x, w: torch.stack([x[0] @ w, x[1]]), [(WIDTH, WIDTH)]),
    "w @ x[0]": (lambda x, w: torch.stack([x[1], w @ x[0]]), [(TOKENS, TOKENS)]),
    "x @ w @ w": (lambda x, w: x @ w @ w, [(WIDTH, WIDTH)]),
    "x @ (v @ w)": (lambda x, v, w: x @ (v @ w), [(WIDTH, 2), (2, WIDTH)]),
    "x @ (w * s)": (lambda x, w, s: x @ (w * s), [(WIDTH, WIDTH), (1,)]),
    "x @ w.t() * s": (lambda x, w, s: x @ w.t() * s, [(WIDTH, WIDTH), ()]),
    "btd,de->bte": (lambda x, w: torch.einsum("btd,de->bte", x, w), [(WIDTH, WIDTH)]),
    "ts,bsd->btd": (lambda x, w: torch.einsum("ts,bsd->btd", w, x), [(TOKENS, TOKENS)]),
    "bmm(x, w)": (torch.bmm, [(BATCH, WIDTH, WIDTH)]),
    "bmm(w, x)": (lambda x, w: torch.bmm(w, x), [(BATCH, TOKENS, TOKENS)]),
    "bmm(x, w.mT)": (lambda x, w: torch.bmm(x, w.mT), [(BATCH, WIDTH, WIDTH)]),
    "mv": (lambda x, v: x + torch.mv(x.reshape(-1, WIDTH), v).view(BATCH, TOKENS, 1), [(WIDTH,)]),
}
RAW_KINDS = tuple(_RAW)


@dataclass(frozen=True)
class Raw:
    """A product with raw parameters, written as in the kind's name."""

    kind: str = "x @ w"
    is_hooked: bool = False

    def build(self, workshop: Workshop) -> nn.Module:
        function, shapes = _RAW[self.kind]
        if self.is_hooked:
            return Op(lambda *args: _double_grad(function(*args)), *shapes)
        return Op(function, *shapes)


def _double_grad(x: Tensor) -> Tensor:
    """Put a hook on x itself."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    return x


@dataclass(frozen=True)
class Addmm:
    alpha: float = 1.0
    beta: float = 1.0
    added: tuple[int, ...] = (WIDTH,)
    is_batched: bool = False

    def build(self, workshop: Workshop) -> nn.Module:
        def flat(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
            out = torch.addmm(b, x.reshape(-1, WIDTH), w, alpha=self.alpha, beta=self.beta)
            return out.view(BATCH, TOKENS, WIDTH)

        def batched(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
            return torch.baddbmm(b, x, w, alpha=self.alpha, beta=self.beta)

        if self.is_batched:
            return Op(batched, self.added, (BATCH, WIDTH, WIDTH))
        return Op(flat, self.added, (WIDTH, WIDTH))


class EmbeddingAdded(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor, others: Others) -> Tensor:
        y: Tensor = x + self.embedding(others["ids"])
        return y


@dataclass(frozen=True)
class Embedding:
    is_sparse: bool = False

    def build(self, workshop: Workshop) -> nn.Module:
        embedding = nn.Embedding(WIDTH, WIDTH, sparse=self.is_sparse)
        workshop.linears.append(embedding)
        return EmbeddingAdded(embedding)


@dataclass(frozen=True)
class Positions:
    """A table that goes through `inside` before it meets the inputs, in a sum or a product."""

    inside: tuple["Piece", ...] = ()
    is_product: bool = False

    def build(self, workshop: Workshop) -> nn.Module:
        inside = Chain([workshop.build(piece) for piece in self.inside])
        return TableUsed(inside, self.is_product)


class TableUsed(nn.Module):
    def __init__(self, inside: nn.Module, is_product: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(BATCH, TOKENS, WIDTH))
        self.inside = inside
        self.is_product = is_product

    def forward(self, x: Tensor, others: Others) -> Tensor:
        table: Tensor = self.inside(self.table, {**others, "x": self.table})
        return x @ table.mT @ table if self.is_product else x + table


@dataclass(frozen=True)
class QueryAttention:
    """Attention of a learned query over the tokens."""

    has_projection: bool = False

    def build(self, workshop: Workshop) -> nn.Module:
        query = Op(lambda x, query: query, (TOKENS, WIDTH))
        projection = nn.Linear(WIDTH, WIDTH) if self.has_projection else nn.Identity()

        def attend(x: Tensor, query: nn.Module, projection: nn.Module) -> Tensor:
            q: Tensor = projection(query(x, {}))
            return x + F.scaled_dot_product_attention(q.expand_as(x), x, x)

        return Wrapped(attend, query, projection)


@dataclass(frozen=True)
class Again:
    """Calls the module of an earlier piece a second time."""

    of: int = 0

    def build(self, workshop: Workshop) -> nn.Module:
        if not workshop.pieces:
            return Op(lambda x: x)
        return workshop.pieces[self.of % len(workshop.pieces)]


@dataclass(frozen=True)
class RawReuse:
    """Uses the weight of an earlier linear layer or embedding past its module."""

    kind: Literal["transposed", "same", "factor", "reshaped"] = "transposed"
    of: int = 0

    def build(self, workshop: Workshop) -> nn.Module:
        linear = workshop.linear(self.of)
        if linear is None:
            return Op(lambda x: x)
        functions: dict[str, Callable[..., Tensor]] = {
            "transposed": lambda x, linear: F.linear(x, linear.weight.t()),
            "same": lambda x, linear: F.linear(x, linear.weight),
            "factor": lambda x, linear: x * linear.weight.sum(),
            "reshaped": lambda x, linear: x @ linear.weight.reshape(WIDTH, 2, 2).flatten(1),
        }
        return Wrapped(functions[self.kind], linear)


@dataclass(frozen=True)
class WeightNorm:
    bias: bool = True

    def build(self, workshop: Workshop) -> nn.Module:
        linear = weight_norm(nn.Linear(WIDTH, WIDTH, bias=self.bias))
        workshop.linears.append(linear)
        return Wrapped(lambda x, linear: linear(x), linear)


class _Scaled(torch.autograd.Function):
    """x * w, written in Python. Counts its backward runs in `counter`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, counter: list[int]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.counter = counter
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        ctx.counter[0] += 1
        return grads[0] * w, (grads[0] * x).sum((0, 1)), None


class PythonScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.counter = [0]

    def forward(self, x: Tensor, others: Others) -> Tensor:
        y: Tensor = _Scaled.apply(x, self.weight, self.counter)
        return y


@dataclass(frozen=True)
class PythonFunction:
    def build(self, workshop: Workshop) -> nn.Module:
        return PythonScaled()


@dataclass(frozen=True)
class Pieces:
    """Splits the width and puts it together again."""

    kind: Literal["split", "chunk", "one of two", "unbind"] = "split"

    def build(self, workshop: Workshop) -> nn.Module:
        def run(x: Tensor, w: Tensor) -> Tensor:
            match self.kind:
                case "split":
                    a, b = x.split([1, 3], -1)
                    return torch.cat([b * w[0], a @ w[:1]], -1)[..., :WIDTH]
                case "chunk":
                    a, b = x.chunk(2, -1)
                    return torch.cat([b, a @ w[:2, :2]], -1)
                case "one of two":
                    a, _ = (x @ w).split(2, -1)
                    return torch.cat([a, a], -1)
                case "unbind":
                    a, b = x.unbind(0)
                    return torch.stack([b @ w, a])

        if self.kind == "split":
            return Op(lambda x, w: run(x, w.view(-1, 1, 1)[:, 0]), (WIDTH,))
        return Op(run, (WIDTH, WIDTH))


@dataclass(frozen=True)
class InPlace:
    """Writes into a view of a copy of x, or into the output of a product."""

    kind: Literal["scale", "add param", "copy product", "product"] = "scale"

    def build(self, workshop: Workshop) -> nn.Module:
        def run(x: Tensor, w: Tensor) -> Tensor:
            if self.kind == "product":
                y = x @ w
                y[:, 0].mul_(2)
                return y
            y = x.clone()
            match self.kind:
                case "scale":
                    y[:, 0].mul_(2)
                case "add param":
                    y[..., :2].add_(w[0, :2])
                case "copy product":
                    y[1].copy_(x[0] @ w)
            return y

        return Op(run, (WIDTH, WIDTH))


@dataclass(frozen=True)
class HookOnValue:
    """A tensor hook on the value itself, or on a new one, which doubles its gradient."""

    is_new: bool = False

    def build(self, workshop: Workshop) -> nn.Module:
        return HookedValue(self.is_new)


class HookedValue(nn.Module):
    def __init__(self, is_new: bool) -> None:
        super().__init__()
        self.is_new = is_new

    def forward(self, x: Tensor, others: Others) -> Tensor:
        # A hook on the stage's own input would run again in the stage before.
        return _double_grad(x * 1.5 if self.is_new or x is others["x"] else x)


class InputAdded(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, others: Others) -> Tensor:
        return x + others["y"] if self.kind == "add" else x @ others["y"].mT @ others["y"]


@dataclass(frozen=True)
class SecondInput:
    kind: Literal["add", "multiply"] = "add"

    def build(self, workshop: Workshop) -> nn.Module:
        return InputAdded(self.kind)


@dataclass(frozen=True)
class Unused:
    """A layer that is never called."""

    def build(self, workshop: Workshop) -> nn.Module:
        return Wrapped(lambda x, linear: x, nn.Linear(WIDTH, WIDTH))


class Around(nn.Module):
    """Calls the network inside: with a residual, checkpointed, or saving to the CPU."""

    def __init__(self, kind: str, inside: nn.Module) -> None:
        super().__init__()
        self.kind = kind
        self.inside = inside

    def forward(self, x: Tensor, others: Others) -> Tensor:
        match self.kind:
            case "residual":
                y: Tensor = x + self.inside(x, others)
                return y
            case "checkpoint":
                y = checkpoint(self.inside, x, others, use_reentrant=False)
                return y
            case _:
                with torch.autograd.graph.save_on_cpu():
                    y = self.inside(x, others)
                return y


@dataclass(frozen=True)
class Block:
    kind: Literal["residual", "checkpoint", "save_on_cpu", "frozen"] = "residual"
    inside: tuple["Piece", ...] = ()

    def build(self, workshop: Workshop) -> nn.Module:
        chain = Chain([workshop.build(piece) for piece in self.inside])
        if self.kind == "frozen":
            return chain.requires_grad_(False)
        return Around(self.kind, chain)


Piece: TypeAlias = (
    Linear
    | Conv
    | Norm
    | Pointwise
    | Raw
    | Addmm
    | Embedding
    | Positions
    | QueryAttention
    | Again
    | RawReuse
    | WeightNorm
    | PythonFunction
    | Pieces
    | InPlace
    | HookOnValue
    | SecondInput
    | Unused
    | Block
)

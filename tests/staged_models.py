"""Models cut into any number of stages, with batches, losses, and what they give unsplit.

The sizes are as small as they can be, and all numbers are float64: what a test compares is the
work of the runtime, and rounding should not hide a fault in it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

WIDTH = 6
VOCABULARY = 7
LENGTH = 4
MOMENTUM = 0.9


class Batch(NamedTuple):
    """What one step takes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


@dataclass
class StepRecord:
    """What one step gave: on one rank, on all of them, or unsplit."""

    outputs: Any = None
    losses: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)


class Model(NamedTuple):
    """How to make a stage, given its number and how many there are; a batch; and a loss."""

    make_stage: Callable[[int, int], nn.Module]
    make_batch: Callable[[int], Batch]
    loss: Callable[[Any, Any, str], Tensor]

    def stage(self, index: int, num_stages: int) -> nn.Module:
        """The same stage with the same parameters, whoever makes it."""
        with torch.random.fork_rng():
            torch.manual_seed(100 + index)
            return self.make_stage(index, num_stages).double()

    def batch(self, size: int, step: int) -> Batch:
        with torch.random.fork_rng():
            torch.manual_seed(step)
            return self.make_batch(size)

    def loss_fn(self, reduction: str) -> Callable[[Any, Any], Tensor]:
        return partial(_loss, self.loss, reduction)


def _loss(loss: Callable[..., Tensor], reduction: str, outputs: Any, target: Any) -> Tensor:
    return loss(outputs, target, reduction)


class MLPStage(nn.Module):
    """Products and a norm around a residual, and a parameter that is used by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.norm(self.up(x)))) * self.scale


class TransformerStage(nn.Module):
    """A causal block; before it the embedding on the first stage, after it the head on the last."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.head = nn.Linear(WIDTH, VOCABULARY) if index == num_stages - 1 else None
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        heads = self.attention(self.before_attention(x)).unflatten(-1, (3, 2, -1))
        query, key, value = heads.movedim(-3, 0).transpose(-2, -3)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(mixed.transpose(-2, -3).flatten(-2))
        x = x + self.mlp(self.before_mlp(x))
        return x if self.head is None else self.head(x)


class ConvStage(nn.Module):
    """A convolution and a norm that does not mix the batch; pooled to classes on the last stage."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2 if index == 0 else 4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3) if index == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.norm(self.conv(x)))
        x = y if x.shape != y.shape else x + y
        return x if self.head is None else self.head(functional.avg_pool2d(x, 4).flatten(1))


class ManyStage(nn.Module):
    """Takes and gives several tensors, nested, not all of which need or get a gradient.

    Between stages go `(x, {"side": y, "spare": z}, ids)`. Nobody uses z, so its layer has no
    gradient; ids are integers.
    """

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.main = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, 2)
        self.table = nn.Embedding(3, WIDTH)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, y: Any, ids: Tensor | None = None, *, mask: Tensor) -> Any:
        side = y if self.is_first else y["side"]
        if ids is None:
            ids = (x[:, 0] > 0).long() + (side[:, 0] > 0).long()
        new_x = torch.tanh(self.main(x) + self.table(ids)) * mask
        new_side = side + torch.sigmoid(self.side(side)) * x
        if self.is_last:
            return new_x, new_side.sum(-1)
        return new_x, {"side": new_side, "spare": self.spare(x)}, ids


def _mlp_batch(size: int) -> Batch:
    return Batch((_randn(size, WIDTH),), {}, _randn(size, WIDTH))


def _transformer_batch(size: int) -> Batch:
    tokens, target = torch.randint(VOCABULARY, (2, size, LENGTH))
    return Batch((tokens,), {}, target)


def _conv_batch(size: int) -> Batch:
    return Batch((_randn(size, 2, 4, 4),), {}, torch.randint(3, (size,)))


def _many_batch(size: int) -> Batch:
    mask = (torch.rand(size, WIDTH) > 0.2).double()
    target = (_randn(size, WIDTH), _randn(size))
    return Batch((_randn(size, WIDTH), _randn(size, WIDTH)), {"mask": mask}, target)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _squares(outputs: Tensor, target: Tensor, reduction: str) -> Tensor:
    return functional.mse_loss(outputs, target, reduction=reduction)


def _cross_entropy(outputs: Tensor, target: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), target.flatten(), reduction=reduction)


def _two_squares(outputs: tuple[Tensor, Tensor], target: Any, reduction: str) -> Tensor:
    first, second = map(partial(_squares, reduction=reduction), outputs, target)
    return first + 0.5 * second


MODELS = {
    "mlp": Model(lambda index, num_stages: MLPStage(), _mlp_batch, _squares),
    "transformer": Model(TransformerStage, _transformer_batch, _cross_entropy),
    "conv": Model(ConvStage, _conv_batch, _cross_entropy),
    "many": Model(ManyStage, _many_batch, _two_squares),
}


def run_unsplit(stages: Iterable[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All stages in turn, in one autograd graph."""
    values: Any = args
    for stage in stages:
        values = stage(*(values if isinstance(values, tuple | list) else (values,)), **kwargs)
    return values


def named_grads(stages: dict[int, nn.Module]) -> dict[str, Tensor | None]:
    """A copy of each parameter's gradient, by stage and name."""
    return {
        f"{index}.{name}": None if param.grad is None else param.grad.clone()
        for index, stage in stages.items()
        for name, param in stage.named_parameters()
    }


def make_optimizer(stages: Iterable[nn.Module], size: int, reduction: str) -> torch.optim.Optimizer:
    """Not Adam, which would make large differences of what rounding does to small gradients.

    A step changes the model, but not so much that it makes large numbers of small ones.
    """
    params = [param for stage in stages for param in stage.parameters()]
    learning_rate = 0.05 if reduction == "mean" else 0.05 / (size * LENGTH)
    return torch.optim.SGD(params, learning_rate, momentum=MOMENTUM)


@cache
def train_unsplit(
    model_name: str, num_stages: int, size: int, reduction: str, num_steps: int
) -> Sequence[StepRecord]:
    """What each step of the unsplit model gives: the whole batch at once, one graph."""
    model = MODELS[model_name]
    stages = {index: model.stage(index, num_stages) for index in range(num_stages)}
    optimizer = make_optimizer(stages.values(), size, reduction)
    records = []
    for step in range(num_steps):
        args, kwargs, target = model.batch(size, step)
        outputs = run_unsplit(stages.values(), args, kwargs)
        loss = model.loss(outputs, target, reduction)
        optimizer.zero_grad()
        loss.backward()
        outputs = pytree.tree_map(Tensor.detach, outputs)
        records.append(StepRecord(outputs, [loss.detach()], named_grads(stages)))
        optimizer.step()
    return records

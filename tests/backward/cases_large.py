"""Cases whose sums are long, and whose tensors are laid out in unusual ways.

Kernels add up 256 rows and more in blocks, so here a gradient is equal to the last bit only if it
is computed by autograd's own formula, on the same layouts, and added in the same order.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from backward.case import Case, floats, frozen, given, raw, wrapped
from backward.cases_products import Block
from backward.cases_runs import Checkpointed

WIDTH, WIDER, ROWS = 48, 64, 300
FLAT, NESTED = (ROWS, WIDTH), (3, 100, WIDTH)
IMAGES = (4, 8, 16, 16)


class SharedWeights(nn.Module):
    """An embedding that is the head too, and a layer's weight that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 70, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.second(self.first(self.embedding(tokens) + x).relu())
        return self.head(self.first(self.norm(hidden)))


def perceptron(*, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDER, bias=bias), nn.GELU(), nn.Linear(WIDER, WIDTH, bias=bias)
    )


def on_transposed(dims: tuple[int, int], *, bias: bool = True) -> nn.Module:
    """A linear layer on an input that is not contiguous."""
    make = partial(nn.Linear, WIDTH, WIDER, bias=bias)
    return wrapped(make, lambda layer, x: layer(x.transpose(*dims)))()


def with_weight_by_columns(width: int = WIDTH, wider: int = WIDER) -> nn.Module:
    layer = nn.Linear(width, wider)
    layer.weight = nn.Parameter(torch.randn(width, wider).t())
    return layer


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3)
    )


def by_channels(*shape: int) -> tuple[Tensor]:
    return (torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_(),)


def attention() -> nn.Module:
    make = partial(nn.MultiheadAttention, WIDTH, 4, batch_first=True)
    return wrapped(make, lambda layer, x: layer(x, x, x, need_weights=False)[0])()


def shared_inputs() -> tuple[Tensor, Tensor]:
    return floats(3, 100, WIDTH), torch.randint(0, 70, (3, 100))


bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)

LARGE_CASES = [
    Case("long: MLP", perceptron, given(FLAT)),
    Case("long: MLP on 3-D input", perceptron, given(NESTED)),
    Case("long: MLP without biases on 3-D input", partial(perceptron, bias=False), given(NESTED)),
    Case("long: MLP on an input that needs no gradient", perceptron, lambda: (torch.randn(FLAT),)),
    Case("long: float64", lambda: perceptron().double(), lambda: (floats(*FLAT).double(),)),
    Case("long: bfloat16", lambda: perceptron().bfloat16(), lambda: (floats(*FLAT).bfloat16(),)),
    Case("long: transposed input", partial(on_transposed, (0, 1)), given((WIDTH, ROWS))),
    Case("long: transposed 3-D input", partial(on_transposed, (0, 1)), given((100, 3, WIDTH))),
    Case(
        "long: transposed 3-D input, autocast",
        partial(on_transposed, (0, 1)),
        given((100, 3, WIDTH)),
        forward_context=bfloat16,
    ),
    Case("long: 3-D input by columns", partial(on_transposed, (1, 2)), given((3, WIDTH, 100))),
    Case(
        "long: transposed 4-D input without a bias",
        partial(on_transposed, (0, 1), bias=False),
        given((50, 3, 2, WIDTH)),
    ),
    Case("long: weight by columns", with_weight_by_columns, given(FLAT)),
    # At odd sizes the two formulas for the gradient of a weight round differently.
    Case("long: odd sizes", lambda: nn.Linear(7, 5), given((1000, 7))),
    Case(
        "long: weight by columns, odd sizes",
        partial(with_weight_by_columns, 7, 5),
        given((1000, 7)),
    ),
    Case("long: weight by columns on 3-D input", with_weight_by_columns, given(NESTED)),
    Case("long: blocks", lambda: nn.Sequential(Block(WIDTH), Block(WIDTH)), given(NESTED)),
    Case("long: checkpointed block", lambda: Checkpointed(Block(WIDTH)), given(NESTED)),
    Case("long: attention", attention, given(NESTED)),
    Case("long: shared weights", SharedWeights, shared_inputs),
    Case("long: shared weights, autocast", SharedWeights, shared_inputs, forward_context=bfloat16),
    Case("long: block, autocast", lambda: Block(WIDTH), given(NESTED), forward_context=bfloat16),
    Case("long: convolutions", convolutions, given(IMAGES)),
    Case("long: checkpointed convolutions", lambda: Checkpointed(convolutions()), given(IMAGES)),
    Case("long: convolutions, autocast", convolutions, given(IMAGES), forward_context=bfloat16),
    Case("long: convolution, frozen bias", frozen(convolutions, "0.bias"), given(IMAGES)),
    Case("long: convolution, frozen weight", frozen(convolutions, "0.weight"), given(IMAGES)),
    Case(
        "long: convolutions by channels",
        lambda: convolutions().to(memory_format=torch.channels_last),
        lambda: by_channels(*IMAGES),
    ),
    Case(
        "long: grouped, dilated convolutions",
        lambda: nn.Sequential(
            nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, dilation=2)
        ),
        given(IMAGES),
    ),
    Case(
        "long: transposed convolutions",
        lambda: nn.Sequential(
            nn.ConvTranspose2d(8, 12, 3), nn.ReLU(), nn.ConvTranspose2d(12, 8, 3, groups=2)
        ),
        given(IMAGES),
    ),
    Case("long: conv1d", lambda: nn.Conv1d(8, 12, 3), given((4, 8, 100))),
    Case("long: conv3d", lambda: nn.Conv3d(4, 6, 3), given((4, 4, 8, 8, 8))),
    Case(
        "long: products on both sides",
        raw(lambda s, x: s.v @ torch.tanh(x @ s.w), w=(WIDTH, WIDER), v=(WIDER, ROWS)),
        given(FLAT),
    ),
    Case(
        "long: addmm with alpha and beta",
        raw(
            lambda s, x: torch.addmm(s.b, x, s.w, alpha=0.3, beta=0.7), w=(WIDTH, WIDER), b=(WIDER,)
        ),
        given(FLAT),
    ),
    Case(
        "long: expert weights",
        raw(
            lambda s, x: torch.baddbmm(s.b, x, s.w, alpha=0.3, beta=0.7),
            w=(3, WIDTH, WIDER),
            b=(3, 1, WIDER),
        ),
        given((3, ROWS, WIDTH)),
    ),
    Case(
        "long: einsum",
        raw(lambda s, x: torch.einsum("btd,dhk->bthk", x, s.w), w=(WIDTH, 4, 16)),
        given(NESTED),
    ),
    Case(
        "long: weight norm",
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDER)),
        given(NESTED),
    ),
    Case(
        "long: weight used by a layer and by a product",
        lambda: wrapped(
            lambda: nn.Linear(WIDTH, WIDTH),
            lambda layer, x: functional.linear(layer(x).tanh(), layer.weight),
        )(),
        given(NESTED),
    ),
]

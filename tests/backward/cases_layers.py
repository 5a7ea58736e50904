"""Cases: the layers of torch.nn that are not linear, and parametrisations."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from backward.case import Case, floats, frozen, given, raw, wrapped


class Symmetric(nn.Module):
    """A parametrisation of our own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric_linear() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def symmetric_bias() -> nn.Module:
    """Only the bias is parametrised: the weight is still the layer's own."""
    layer = nn.Linear(4, 3)
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    return layer


def channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3)).to(
        memory_format=torch.channels_last
    )


def channels_last_input() -> tuple[Tensor]:
    x = torch.randn(2, 4, 7, 7).to(memory_format=torch.channels_last)
    return (x.requires_grad_(),)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3, stride=2)
    )


CONVOLUTIONS = [
    Case("conv1d", lambda: nn.Conv1d(4, 6, 3), given((2, 4, 9))),
    Case("conv2d", lambda: nn.Conv2d(4, 6, 3), given((2, 4, 7, 6))),
    Case("conv3d", lambda: nn.Conv3d(2, 3, 2), given((2, 2, 4, 3, 4))),
    Case(
        "conv1d with stride, padding and dilation",
        lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2),
        given((2, 4, 9)),
    ),
    Case(
        "conv2d with stride, padding and dilation",
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        given((2, 4, 7, 6)),
    ),
    Case("conv2d with groups", lambda: nn.Conv2d(4, 8, 3, groups=2), given((2, 4, 6, 6))),
    Case("depthwise conv1d", lambda: nn.Conv1d(4, 4, 3, groups=4, padding=1), given((2, 4, 6))),
    Case("conv2d without bias", lambda: nn.Conv2d(4, 6, 1, bias=False), given((2, 4, 5, 5))),
    Case(
        "conv2d with same padding", lambda: nn.Conv2d(4, 6, 3, padding="same"), given((2, 4, 5, 5))
    ),
    Case(
        "conv2d with circular padding",
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        given((2, 4, 5, 5)),
    ),
    Case("conv1d without a batch", lambda: nn.Conv1d(4, 6, 3), given((4, 9))),
    Case("conv2d without a batch", lambda: nn.Conv2d(4, 6, 3), given((4, 7, 7))),
    Case("conv2d on a zero-size batch", lambda: nn.Conv2d(4, 6, 3), given((0, 4, 7, 7))),
    Case("transposed conv1d", lambda: nn.ConvTranspose1d(4, 6, 3), given((2, 4, 5))),
    Case(
        "transposed conv2d with stride, padding and groups",
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        given((2, 4, 4, 4)),
    ),
    Case("conv2d in channels_last", channels_last, channels_last_input),
    Case("convolutional net with batch norm", conv_net, given((3, 3, 7, 7))),
    Case(
        "shared conv2d called twice",
        wrapped(lambda: nn.Conv2d(4, 4, 3, padding=1), lambda c, x: c(c(x).relu())),
        given((2, 4, 5, 5)),
    ),
    Case(
        "conv2d with a raw weight and no bias",
        raw(lambda s, x: F.conv2d(x, s.w), w=(5, 4, 3, 3)),
        given((2, 4, 6, 6)),
    ),
    Case(
        "conv2d with a computed weight",
        raw(lambda s, x: F.conv2d(x, s.w.tanh(), s.b), w=(5, 4, 3, 3), b=(5,)),
        given((2, 4, 6, 6)),
    ),
    Case(
        "convolution of a parameter by the input",
        raw(lambda s, x: F.conv2d(s.image, x), image=(1, 4, 6, 6)),
        given((5, 4, 3, 3)),
    ),
    Case(
        "frozen conv2d weight, trainable bias",
        frozen(lambda: nn.Conv2d(4, 6, 3), "weight"),
        given((2, 4, 6, 6)),
    ),
    Case(
        "frozen conv2d bias, trainable weight",
        frozen(lambda: nn.Conv2d(4, 6, 3), "bias"),
        given((2, 4, 6, 6)),
    ),
]

NORMS = [
    Case(
        "batch norm 1d",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()),
        given((5, 4)),
    ),
    Case("batch norm 2d", lambda: nn.BatchNorm2d(4), given((3, 4, 3, 3))),
    Case("batch norm in eval mode", lambda: nn.BatchNorm1d(4).eval(), given((5, 4))),
    Case(
        "layer norm",
        lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.LayerNorm(4)),
        given((2, 5, 6)),
    ),
    Case("layer norm without bias", lambda: nn.LayerNorm(6, bias=False), given((2, 5, 6))),
    Case("group norm", lambda: nn.GroupNorm(2, 4), given((3, 4, 5))),
    Case("instance norm with affine", lambda: nn.InstanceNorm1d(4, affine=True), given((3, 4, 5))),
    Case("RMS norm", lambda: nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 4)), given((2, 5, 6))),
    Case("PReLU", lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(6)), given((5, 4))),
]

EMBEDDINGS = [
    Case("embedding", lambda: nn.Embedding(7, 4), lambda: (torch.randint(7, (3, 5)),)),
    Case(
        "embedding with a padding index",
        lambda: nn.Embedding(7, 4, padding_idx=0),
        lambda: (torch.randint(7, (3, 5)),),
    ),
    Case(
        "sparse embedding",
        lambda: nn.Embedding(7, 4, sparse=True),
        lambda: (torch.randint(7, (3, 5)),),
    ),
    Case(
        "sparse embedding beside an input that requires a gradient",
        wrapped(
            lambda: [nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4)],
            lambda table, layer, ids, x: layer(table(ids) * x),
        ),
        lambda: (torch.randint(7, (3, 5)), floats(3, 5, 4)),
    ),
    Case("embedding bag", lambda: nn.EmbeddingBag(7, 4), lambda: (torch.randint(7, (3, 5)),)),
    Case(
        "token and position embeddings before a linear layer",
        wrapped(
            lambda: [nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 6)],
            lambda tokens, places, head, ids: head(tokens(ids) + places(torch.arange(5))),
        ),
        lambda: (torch.randint(7, (3, 5)),),
    ),
]

SEQUENCES = [
    Case(
        "multi-head attention",
        wrapped(
            lambda: nn.MultiheadAttention(8, 2, batch_first=True),
            lambda attend, q, k, v: attend(q, k, v),
        ),
        given((2, 3, 8), (2, 5, 8), (2, 5, 8)),
    ),
    Case(
        "multi-head self-attention without weights",
        wrapped(
            lambda: nn.MultiheadAttention(8, 2),
            lambda attend, x: attend(x, x, x, need_weights=False)[0],
        ),
        given((3, 2, 8)),
    ),
    Case(
        "multi-head attention with widths of its own and bias rows",
        wrapped(
            lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
            lambda attend, q, k, v: attend(q, k, v),
        ),
        given((3, 2, 8), (5, 2, 4), (5, 2, 6)),
    ),
    Case(
        "transformer encoder layer",
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        given((2, 5, 8)),
    ),
    Case(
        "transformer decoder layer",
        lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        given((2, 3, 8), (2, 5, 8)),
    ),
    Case("LSTM", lambda: nn.LSTM(4, 5, num_layers=2, batch_first=True), given((2, 3, 4))),
    Case(
        "bidirectional GRU with a given state",
        wrapped(lambda: nn.GRU(4, 5, bidirectional=True), lambda gru, x, h: gru(x, h)),
        given((3, 2, 4), (2, 2, 5)),
    ),
    Case(
        "LSTM cell run three times",
        wrapped(lambda: nn.LSTMCell(4, 4), lambda cell, x: cell(x, cell(x, cell(x)))[0]),
        given((2, 4)),
    ),
]

PARAMETRISATIONS = [
    Case(
        "weight norm on a linear layer",
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        given((5, 4)),
    ),
    Case(
        "weight norm on a conv1d",
        lambda: parametrizations.weight_norm(nn.Conv1d(4, 3, 2)),
        given((2, 4, 5)),
    ),
    Case("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), given((5, 4))),
    Case("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 4)), given((5, 4))),
    Case("parametrisation of one's own", symmetric_linear, given((2, 5, 4))),
    Case("parametrised bias", symmetric_bias, given((5, 4))),
    Case(
        "weight norm inside an MLP",
        lambda: nn.Sequential(
            nn.Linear(4, 6),
            nn.GELU(),
            parametrizations.weight_norm(nn.Linear(6, 6)),
            nn.Linear(6, 2),
        ),
        given((5, 4)),
    ),
]

CASES = CONVOLUTIONS + NORMS + EMBEDDINGS + SEQUENCES + PARAMETRISATIONS

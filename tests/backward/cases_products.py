"""Cases: linear layers and products with parameters, tied, batched, computed."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backward.case import Case, Raw, floats, frozen, given, raw, wrapped


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


class Block(nn.Module):
    """A transformer block as in the benchmark: fused qkv, attention, 4x MLP."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def tied_linears() -> nn.Module:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def tied_embedding() -> nn.Module:
    table, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    return nn.Sequential(table, nn.Tanh(), head)


def shared_three_times() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def experts(stage: Raw, x: Tensor) -> Tensor:
    hidden = F.gelu(torch.baddbmm(stage.bias, x, stage.up))
    return torch.bmm(hidden, stage.down)


def routed_experts(stage: Raw, x: Tensor) -> Tensor:
    """Top-1 routing with a loop over experts; an expert may get no token."""
    scores = (x @ stage.gate).softmax(-1)
    top, choice = scores.max(-1)
    out = torch.zeros_like(x)
    for expert in range(stage.up.shape[0]):
        rows = (choice == expert).nonzero().squeeze(-1)
        hidden = F.relu(x[rows] @ stage.up[expert]) @ stage.down[expert]
        out = out.index_add(0, rows, hidden * top[rows, None])
    return out


LINEAR = [
    Case("MLP", mlp, given((4, 6))),
    Case(
        "transformer blocks, ending in a linear layer on 3-D input",
        lambda: nn.Sequential(Block(8), Block(8), nn.Linear(8, 6)),
        given((2, 5, 8)),
    ),
    Case("linear on 4-D input", lambda: nn.Linear(4, 3), given((2, 3, 2, 4))),
    Case("linear on 1-D input", lambda: nn.Linear(4, 3), given((4,))),
    Case("linear without bias on 2-D input", lambda: nn.Linear(4, 3, bias=False), given((5, 4))),
    Case("linear without bias on 3-D input", lambda: nn.Linear(4, 3, bias=False), given((2, 5, 4))),
    Case("linear without bias on 1-D input", lambda: nn.Linear(4, 3, bias=False), given((4,))),
    Case("linear on a zero-size batch", mlp, given((0, 6))),
    Case("linear on a zero-size 3-D batch", lambda: nn.Linear(4, 3), given((0, 5, 4))),
    Case("linear on one row", lambda: nn.Linear(4, 3), given((1, 4))),
    Case("linear to one feature", lambda: nn.Linear(4, 1), given((5, 4))),
    Case(
        "linear on a transposed input",
        lambda: nn.Linear(4, 3),
        lambda: (torch.randn(4, 5).t().requires_grad_(),),
    ),
    Case(
        "linear on a transposed 3-D input",
        lambda: nn.Linear(4, 3),
        lambda: (torch.randn(5, 2, 4).transpose(0, 1).requires_grad_(),),
    ),
    Case(
        "linear on an expanded input",
        lambda: nn.Linear(4, 3),
        lambda: (torch.randn(1, 4).expand(5, 4).requires_grad_(),),
    ),
    Case(
        "bilinear",
        wrapped(lambda: nn.Bilinear(3, 4, 5), lambda b, x, y: b(x, y)),
        given((6, 3), (6, 4)),
    ),
    Case("subclass of linear with its own forward", lambda: Scaled(4, 3), given((5, 4))),
    Case("shared module called twice", shared_three_times, given((4, 5))),
    Case("two linear layers with one weight", tied_linears, given((4, 5))),
    Case("embedding and head with one weight", tied_embedding, lambda: (torch.randint(7, (3, 4)),)),
    Case(
        "weight used twice, the two biases registered first",
        raw(
            lambda s, x: F.linear(F.linear(x, s.w, s.first).tanh(), s.w, s.second),
            first=(5,),
            second=(5,),
            w=(5, 5),
        ),
        given((4, 5)),
    ),
    Case(
        "weight used twice on 3-D input, the two biases registered first",
        raw(
            lambda s, x: F.linear(F.linear(x, s.w, s.first).tanh(), s.w, s.second),
            first=(5,),
            second=(5,),
            w=(5, 5),
        ),
        given((2, 4, 5)),
    ),
    Case(
        "two layers joined by a third with the weight of one and the bias of the other",
        raw(
            lambda s, x: F.linear(
                F.linear(F.linear(x, s.a, s.p).tanh(), s.b, s.q).tanh(), s.a, s.q
            ),
            a=(4, 4),
            b=(4, 4),
            p=(4,),
            q=(4,),
        ),
        given((3, 4)),
    ),
    Case(
        "weight used by a product and by an activation",
        raw(lambda s, x: (x @ s.w).tanh() * s.w.sum() + s.w[0], w=(4, 4)),
        given((3, 4)),
    ),
    Case(
        "weight used once with and once without the input",
        raw(lambda s, x: x @ s.w + s.w @ s.w, w=(4, 4)),
        given((4, 4)),
    ),
    Case(
        "bias used by two layers",
        raw(
            lambda s, x: F.linear(F.linear(x, s.a, s.bias).tanh(), s.b, s.bias),
            bias=(4,),
            a=(4, 4),
            b=(4, 4),
        ),
        given((3, 4)),
    ),
]

PRODUCTS = [
    Case("x @ w", raw(lambda s, x: x @ s.w, w=(4, 3)), given((5, 4))),
    Case("x @ w on 3-D input", raw(lambda s, x: x @ s.w, w=(4, 3)), given((2, 5, 4))),
    Case("w @ x", raw(lambda s, x: s.w @ x, w=(3, 5)), given((5, 4))),
    Case("w @ x on 3-D input", raw(lambda s, x: s.w @ x, w=(3, 5)), given((2, 5, 4))),
    Case("x @ w.T", raw(lambda s, x: x @ s.w.T, w=(3, 4)), given((5, 4))),
    Case("w.T @ x", raw(lambda s, x: s.w.T @ x, w=(5, 3)), given((5, 4))),
    Case("x.T @ w", raw(lambda s, x: x.T @ s.w, w=(5, 3)), given((5, 4))),
    Case("w @ x @ w", raw(lambda s, x: s.w @ x @ s.w, w=(4, 4)), given((4, 4))),
    Case("w.T @ x @ w", raw(lambda s, x: s.w.T @ x @ s.w, w=(4, 4)), given((4, 4))),
    Case("x @ w @ w.T", raw(lambda s, x: x @ s.w @ s.w.T, w=(4, 3)), given((5, 4))),
    Case(
        "weight whose row is the bias",
        raw(lambda s, x: F.linear(x, s.w, s.w[:, 0]), w=(3, 4)),
        given((5, 4)),
    ),
    Case(
        "weight cast to another type",
        lambda: Raw(lambda s, x: x @ s.w.float(), w=torch.randn(4, 3).double()),
        given((5, 4)),
    ),
    Case("x @ v with a vector parameter", raw(lambda s, x: x @ s.v, v=(4,)), given((5, 4))),
    Case("v @ x with a vector parameter", raw(lambda s, x: s.v @ x, v=(5,)), given((5, 4))),
    Case("x @ w with a vector input", raw(lambda s, x: x @ s.w, w=(4, 3)), given((4,))),
    Case("outer product", raw(lambda s, x: torch.outer(x, s.v), v=(4,)), given((3,))),
    Case(
        "x @ slices of w",
        raw(lambda s, x: x @ s.w[:, :3] + (x @ s.w[:, 3:]).sin(), w=(4, 6)),
        given((5, 4)),
    ),
    Case("x @ reshaped w", raw(lambda s, x: x @ s.w.view(4, 6), w=(2, 2, 6)), given((5, 4))),
    Case("x @ (a @ b)", raw(lambda s, x: x @ (s.a @ s.b), a=(4, 2), b=(2, 6)), given((5, 4))),
    Case(
        "x @ w + b with b of full shape",
        raw(lambda s, x: torch.addmm(s.b, x, s.w), b=(5, 3), w=(4, 3)),
        given((5, 4)),
    ),
    Case(
        "addmm with alpha and beta",
        raw(lambda s, x: torch.addmm(s.b, x, s.w, beta=0.5, alpha=-2), b=(3,), w=(4, 3)),
        given((5, 4)),
    ),
    Case(
        "addmm with beta zero",
        raw(lambda s, x: torch.addmm(s.b, x, s.w, beta=0, alpha=3), b=(3,), w=(4, 3)),
        given((5, 4)),
    ),
    Case(
        "addmm onto a column",
        raw(lambda s, x: torch.addmm(s.b, x, s.w), b=(5, 1), w=(4, 3)),
        given((5, 4)),
    ),
    Case(
        "addmm onto one number",
        raw(lambda s, x: torch.addmm(s.b, x, s.w, beta=2), b=(), w=(4, 3)),
        given((5, 4)),
    ),
    Case(
        "addmm onto a row of one number",
        raw(lambda s, x: torch.addmm(s.b, x, s.w), b=(1,), w=(4, 3)),
        given((5, 4)),
    ),
    Case(
        "addmm onto an activation",
        raw(lambda s, x, y: torch.addmm(y, x, s.w, beta=0.5, alpha=2), w=(4, 3)),
        given((5, 4), (5, 3)),
    ),
    Case(
        "addmm with the parameter on the left",
        raw(lambda s, x: torch.addmm(s.b, s.w, x, alpha=0.5), b=(4,), w=(3, 5)),
        given((5, 4)),
    ),
    Case(
        "addmm of the bias's own transpose",
        raw(lambda s, x: torch.addmm(s.w.t(), x, s.w), w=(4, 4)),
        given((4, 4)),
    ),
    Case(
        "addmv", raw(lambda s, x: torch.addmv(s.b, s.w, x, alpha=2), b=(3,), w=(3, 4)), given((4,))
    ),
    Case(
        "einsum with one raw parameter",
        raw(lambda s, x: torch.einsum("bti,io->bto", x, s.w), w=(4, 3)),
        given((2, 5, 4)),
    ),
    Case(
        "einsum with heads",
        raw(lambda s, x: torch.einsum("bti,hio->bhto", x, s.w), w=(2, 4, 3)),
        given((2, 5, 4)),
    ),
    Case(
        "einsum with two parameters",
        raw(lambda s, x: torch.einsum("bi,ij,jo->bo", x, s.a, s.b), a=(4, 3), b=(3, 5)),
        given((2, 4)),
    ),
    Case(
        "matmul with a batched parameter", raw(lambda s, x: x @ s.w, w=(2, 4, 3)), given((2, 5, 4))
    ),
    Case(
        "matmul with a broadcast batched parameter",
        raw(lambda s, x: x @ s.w, w=(3, 1, 4, 3)),
        given((2, 5, 4)),
    ),
    Case(
        "bmm with expert weights",
        raw(lambda s, x: torch.bmm(x, s.w), w=(3, 4, 5)),
        given((3, 2, 4)),
    ),
    Case(
        "bmm with expert weights on the left",
        raw(lambda s, x: torch.bmm(s.w, x), w=(3, 5, 4)),
        given((3, 4, 2)),
    ),
    Case(
        "bmm with transposed expert weights",
        raw(lambda s, x: torch.bmm(x, s.w.mT), w=(3, 5, 4)),
        given((3, 2, 4)),
    ),
    Case(
        "expert MLPs with baddbmm",
        raw(experts, bias=(3, 1, 6), up=(3, 4, 6), down=(3, 6, 4)),
        given((3, 2, 4)),
    ),
    Case(
        "baddbmm with alpha and beta",
        raw(lambda s, x: torch.baddbmm(s.b, x, s.w, beta=3, alpha=0.5), b=(5,), w=(3, 4, 5)),
        given((3, 2, 4)),
    ),
    Case(
        "addbmm",
        raw(lambda s, x: torch.addbmm(s.b, x, s.w), b=(2, 5), w=(3, 4, 5)),
        given((3, 2, 4)),
    ),
    Case(
        "experts chosen by a router",
        raw(routed_experts, gate=(4, 3), up=(3, 4, 6), down=(3, 6, 4)),
        given((6, 4)),
    ),
    Case(
        "hyper-network: the weight is computed from the input",
        raw(lambda s, x: torch.bmm(x[:, None], (x @ s.w).view(-1, 4, 3)).squeeze(1), w=(4, 12)),
        given((5, 4)),
    ),
    Case(
        "weight scaled by the input",
        raw(lambda s, x: x @ (s.w * x.mean()), w=(4, 3)),
        given((5, 4)),
    ),
    Case(
        "weight normalised by hand",
        raw(lambda s, x: F.linear(x, s.w / s.w.norm(dim=1, keepdim=True), s.b), b=(3,), w=(3, 4)),
        given((5, 4)),
    ),
    Case(
        "non-contiguous parameter in a product",
        lambda: Raw(lambda s, x: x @ s.w, w=torch.randn(3, 4).t()),
        given((5, 4)),
    ),
    Case(
        "non-contiguous parameter in a linear function",
        lambda: Raw(lambda s, x: F.linear(x, s.w), w=torch.randn(4, 3).t()),
        given((5, 4)),
    ),
    Case("float64 MLP", lambda: mlp().double(), lambda: (floats(4, 6, dtype=torch.float64),)),
    Case("frozen weights, trainable biases", frozen(mlp, "weight"), given((4, 6))),
    Case("frozen biases, trainable weights", frozen(mlp, "bias"), given((4, 6))),
    Case("frozen stage", frozen(mlp, ""), given((4, 6))),
    Case("frozen first layer", frozen(mlp, "0.weight", "0.bias"), given((4, 6))),
    Case("frozen weights, trainable biases, 3-D input", frozen(mlp, "weight"), given((2, 3, 6))),
    Case(
        "frozen addmm weight with a trainable bias",
        frozen(raw(lambda s, x: torch.addmm(s.b, x, s.w, beta=2), b=(3,), w=(4, 3)), "w"),
        given((5, 4)),
    ),
]

CASES = LINEAR + PRODUCTS

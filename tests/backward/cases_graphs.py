"""Cases: the shape of the graph: which inputs, outputs and parameters meet, and how."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backward.case import Case, Raw, floats, frozen, given, raw, wrapped
from backward.cases_products import mlp


def nested_outputs(stage: Raw, x: Tensor) -> dict[str, Any]:
    hidden = (x @ stage.w).tanh()
    return {
        "list": [hidden @ stage.v, 3, None],
        "tuple": (hidden.sum(1), ("name", hidden.detach(), hidden.argmax(1))),
        "flag": True,
        "empty": (),
        "hidden": hidden,
    }


def two_towers(left: nn.Module, right: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, b = left(x), right(y)
    return a, b, a + b


def in_place_on_a_view(layer: nn.Module, x: Tensor) -> Tensor:
    hidden = layer(x)
    hidden[..., :2].mul_(2).sin_()
    hidden[..., 2] = x[..., 0]
    return hidden * 3


def write_rows(stage: Raw, x: Tensor) -> Tensor:
    """Parameters written in place into an activation."""
    hidden = x * 1
    hidden[:, 0] = stage.v
    hidden += stage.w
    return hidden


class Half(nn.Module):
    """Holds a layer that another module may hold too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def halves_of_one_layer() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(Half(layer), Half(layer))


def hooked(layer: nn.Module, x: Tensor) -> Tensor:
    hidden = layer(x)
    hidden.register_hook(lambda grad: grad * 2)
    return hidden.tanh()


def hooked_at_node(layer: nn.Module, x: Tensor) -> Tensor:
    hidden = layer(x)
    hidden.grad_fn.register_prehook(lambda grads: tuple(grad * 2 for grad in grads))
    return hidden.tanh()


def layer_with_backward_hooks() -> nn.Module:
    layer = nn.Linear(4, 5)
    layer.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))
    layer.register_full_backward_hook(lambda _, grads, __: (grads[0] * 3,))
    return nn.Sequential(nn.Linear(4, 4), layer)


def unused_branch(stage: Raw, x: Tensor) -> Tensor:
    _ = x @ stage.spare
    return x @ stage.w


WITHOUT_INPUTS = [
    Case(
        "positional table added to the input",
        raw(lambda s, x: x + s.table, table=(5, 4)),
        given((2, 5, 4)),
    ),
    Case(
        "positional table before a linear layer",
        raw(lambda s, x: F.linear(x + s.table[:3], s.w, s.b), b=(6,), w=(6, 4), table=(5, 4)),
        given((2, 3, 4)),
    ),
    Case(
        "learned query with a projection of its own",
        raw(lambda s, x: ((s.query @ s.w) @ x.mT).softmax(-1) @ x, query=(2, 3), w=(3, 4)),
        given((3, 5, 4)),
    ),
    Case(
        "learned query through linear layers",
        wrapped(
            lambda: [nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(2, 4)],
            lambda q, k, table, x: (q(table.weight) @ k(x).mT).softmax(-1) @ x,
        ),
        given((3, 5, 4)),
    ),
    Case(
        "output of parameters only, beside one of the input",
        raw(lambda s, x: (x @ s.w, s.a @ s.b), w=(4, 4), a=(2, 3), b=(3, 2)),
        given((5, 4)),
    ),
    Case(
        "output of parameters only that share a weight with the input",
        raw(lambda s, x: (x @ s.w, s.a @ s.w), w=(4, 4), a=(2, 4)),
        given((5, 4)),
    ),
    Case(
        "output of parameters only that came through a layer",
        wrapped(
            lambda: [nn.Linear(4, 4), nn.Linear(4, 3), nn.Embedding(2, 4)],
            lambda a, b, table, x: (a(x), b(a(table.weight))),
        ),
        given((5, 4)),
    ),
    Case(
        "outputs that are pieces of a parameter",
        raw(lambda s, x: (x @ s.w, *s.v.sin().split([2, 3])), v=(5, 2), w=(4, 4)),
        given((5, 4)),
    ),
    Case(
        "outputs of two parameters, and of their sum",
        raw(lambda s, x: (x @ s.w, s.a.sin(), s.b.sin(), s.a + s.b), a=(3,), b=(3,), w=(4, 4)),
        given((5, 4)),
    ),
    Case("output that is a parameter", raw(lambda s, x: (x @ s.w, s.w), w=(4, 4)), given((5, 4))),
    Case(
        "parameter that takes no part",
        raw(lambda s, x: x @ s.w, spare=(3,), w=(4, 4)),
        given((5, 4)),
    ),
    Case(
        "parameter on a branch that is dropped",
        raw(unused_branch, spare=(4, 2), w=(4, 4)),
        given((5, 4)),
    ),
    Case("no parameters at all", lambda: nn.Tanh(), given((5, 4))),
    Case(
        "one number as a scale",
        raw(lambda s, x: x * s.scale + s.shift, scale=(), shift=(1,)),
        given((5, 4)),
    ),
    Case("input that needs no gradient", mlp, lambda: (torch.randn(4, 6),)),
    Case("input that needs no gradient, 3-D", mlp, lambda: (torch.randn(2, 4, 6),)),
    Case(
        "input that needs no gradient, raw product",
        raw(lambda s, x: x @ s.w, w=(4, 3)),
        lambda: (torch.randn(2, 4),),
    ),
    Case(
        "input that needs no gradient, conv2d",
        lambda: nn.Conv2d(3, 4, 3),
        lambda: (torch.randn(2, 3, 5, 5),),
    ),
    Case(
        "input that needs no gradient, biases only",
        frozen(mlp, "weight"),
        lambda: (torch.randn(4, 6),),
    ),
    Case(
        "frozen layer on an input that needs no gradient",
        frozen(mlp, "0.weight", "0.bias"),
        lambda: (torch.randn(4, 6),),
    ),
    Case(
        "token ids through a transformer",
        lambda: nn.Sequential(
            nn.Embedding(7, 8),
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
            nn.Linear(8, 7),
        ),
        lambda: (torch.randint(7, (2, 5)),),
    ),
    Case(
        "detached activation in the middle",
        wrapped(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], lambda a, b, x: b(a(x).detach()) + x),
        given((5, 4)),
    ),
    Case(
        "layer under no_grad in the middle",
        wrapped(
            lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], lambda a, b, x: b(torch.no_grad()(a)(x)) + x
        ),
        given((5, 4)),
    ),
]

SEVERAL = [
    Case(
        "two inputs",
        wrapped(lambda: [nn.Linear(4, 5), nn.Linear(3, 5)], lambda a, b, x, y: a(x) * b(y)),
        given((2, 4), (2, 3)),
    ),
    Case(
        "two inputs of which one needs no gradient",
        wrapped(lambda: [nn.Linear(4, 5), nn.Linear(3, 5)], lambda a, b, x, y: a(x) * b(y)),
        lambda: (floats(2, 4), torch.randn(2, 3)),
    ),
    Case(
        "an input that is not used",
        wrapped(lambda: nn.Linear(4, 5), lambda a, x, y: a(x)),
        given((2, 4), (2, 3)),
    ),
    Case(
        "the same input twice",
        wrapped(lambda: nn.Linear(4, 5), lambda a, x, y: a(x) * a(y.sin())),
        lambda: (floats(2, 4),) * 2,
    ),
    Case(
        "nested and keyword inputs with values that are no tensors",
        wrapped(
            lambda: nn.Linear(4, 5),
            lambda a, pair, n, *, scale, mask: a(pair["x"] * n) * scale[0] + mask,
        ),
        lambda: ({"x": floats(2, 4), "name": "x"}, 2),
        make_kwargs=lambda: {"scale": [floats(5), None], "mask": torch.ones(2, 5)},
    ),
    Case("a non-leaf input", mlp, lambda: (floats(4, 6) * 2,)),
    Case("a view of a non-leaf as input", mlp, lambda: ((floats(6, 4) * 2).t(),)),
    Case(
        "two outputs",
        wrapped(lambda: [nn.Linear(4, 5), nn.Linear(3, 5)], two_towers),
        given((2, 4), (2, 3)),
    ),
    Case(
        "two towers of which one gets no gradient",
        wrapped(lambda: [nn.Linear(4, 5), nn.Linear(3, 5)], two_towers),
        given((2, 4), (2, 3)),
        unused=frozenset({1, 2}),
    ),
    Case(
        "three outputs of which one gets no gradient",
        wrapped(lambda: [nn.Linear(4, 5), nn.Linear(3, 5)], two_towers),
        given((2, 4), (2, 3)),
        unused=frozenset({2}),
    ),
    Case(
        "layers that lead only to an output without a gradient",
        wrapped(lambda: [nn.Linear(4, 5), nn.Linear(4, 3)], lambda a, b, x: (a(x), b(x))),
        given((2, 4)),
        unused=frozenset({0}),
    ),
    Case(
        "nested outputs with values that are no tensors",
        raw(nested_outputs, v=(3, 2), w=(4, 3)),
        given((5, 4)),
        unused=frozenset({1}),
    ),
    Case(
        "split outputs",
        wrapped(lambda: nn.Linear(4, 6), lambda a, x: torch.split(a(x), [1, 2, 3], dim=1)),
        given((5, 4)),
    ),
    Case(
        "split outputs, some unused",
        wrapped(lambda: nn.Linear(4, 6), lambda a, x: torch.split(a(x), [1, 2, 3], dim=-1)),
        given((2, 5, 4)),
        unused=frozenset({0, 2}),
    ),
    Case(
        "chunk outputs",
        wrapped(lambda: nn.Linear(4, 6), lambda a, x: a(x).chunk(3, dim=1)),
        given((5, 4)),
    ),
    Case(
        "unbind outputs, one unused",
        wrapped(lambda: nn.Linear(4, 6), lambda a, x: list(a(x).unbind(0))),
        given((3, 4)),
        unused=frozenset({1}),
    ),
    Case(
        "split weights",
        raw(lambda s, x: [x @ w for w in s.w.split([2, 4], dim=1)], w=(4, 6)),
        given((5, 4)),
    ),
    Case(
        "unbound expert weights, one output unused",
        raw(lambda s, x: [x @ w for w in s.w.unbind(0)], w=(3, 4, 2)),
        given((5, 4)),
        unused=frozenset({2}),
    ),
    Case(
        "input returned unchanged beside the output",
        wrapped(lambda: nn.Linear(4, 5), lambda a, x: (a(x), x)),
        given((2, 4)),
    ),
    Case(
        "input returned unchanged, its gradient the only one",
        wrapped(lambda: nn.Linear(4, 5), lambda a, x: (a(x), x)),
        given((2, 4)),
        unused=frozenset({0}),
    ),
    Case(
        "one of two inputs returned unchanged",
        wrapped(lambda: nn.Linear(4, 5), lambda a, x, y: (a(x), y)),
        given((2, 4), (2, 3)),
    ),
    Case(
        "the same tensor as output twice",
        wrapped(lambda: nn.Linear(4, 5), lambda a, x: (lambda y: (y, y))(a(x))),
        given((2, 4)),
    ),
    Case(
        "an output and the activation it is computed from",
        wrapped(
            lambda: [nn.Linear(4, 5), nn.Linear(5, 3)], lambda a, b, x: (lambda h: (h, b(h)))(a(x))
        ),
        given((2, 4)),
    ),
    Case(
        "an output and a view of it",
        wrapped(lambda: nn.Linear(4, 6), lambda a, x: (lambda y: (y, y.view(3, 4)))(a(x))),
        given((2, 4)),
    ),
    Case(
        "output of one number",
        wrapped(lambda: nn.Linear(4, 5), lambda a, x: a(x).mean()),
        given((2, 4)),
    ),
    Case(
        "multi-output node in the middle",
        wrapped(
            lambda: [nn.Linear(4, 6), nn.Linear(3, 3)],
            lambda a, b, x: (lambda h: b(h[0]) * h[1])(a(x).chunk(2, -1)),
        ),
        given((5, 4)),
    ),
    Case(
        "a layer whose output the loss uses twice",
        wrapped(lambda: nn.Linear(4, 4), lambda a, x: (lambda h: h * h.sin() + h)(a(x))),
        given((5, 4)),
    ),
]

SHARING = [
    Case(
        "two parameters with the same gradient",
        raw(lambda s, x: x + s.a + s.b, a=(3, 4), b=(3, 4)),
        given((3, 4)),
    ),
    Case(
        "parameter and input with the same gradient",
        raw(lambda s, x: x + s.a, a=(3, 4)),
        given((3, 4)),
    ),
    Case(
        "computed parameter added, broadcast and scaled",
        raw(lambda s, x: torch.add(x.exp(), s.a.sin(), alpha=3), a=(4,)),
        given((3, 4)),
    ),
    Case(
        "computed parameter to which an input is added and scaled",
        raw(lambda s, x: torch.add(s.a.sin(), x.exp(), alpha=3), a=(3, 1)),
        given((3, 4)),
    ),
    Case(
        "two computed parameters added, one of them used again by a product",
        raw(lambda s, x: (x @ s.b.sin() + s.a.cos()) + s.b.sin(), a=(4,), b=(4, 4)),
        given((4, 4)),
    ),
    Case(
        "computed parameter of another type added",
        raw(lambda s, x: x.double() + s.a.sin(), a=(3, 4)),
        given((3, 4)),
    ),
    Case(
        "tensor hook on a computed parameter that is added",
        raw(lambda s, x: x + hooked(torch.sin, s.a), a=(3, 4)),
        given((3, 4)),
    ),
    Case("one layer held by two modules", halves_of_one_layer, given((5, 4))),
    Case(
        "layer called with a keyword",
        wrapped(lambda: nn.Linear(4, 5), lambda a, x: a(input=x)),
        given((3, 4)),
    ),
    Case(
        "conv1d called with a keyword",
        wrapped(lambda: nn.Conv1d(4, 5, 1), lambda a, x: a(input=x)),
        given((2, 4, 3)),
    ),
    Case(
        "tensor hook on a layer's output", wrapped(lambda: nn.Linear(4, 5), hooked), given((3, 4))
    ),
    Case(
        "tensor hook on a layer's 3-D output",
        wrapped(lambda: nn.Linear(4, 5), hooked),
        given((2, 3, 4)),
    ),
    Case(
        "node hook on a layer's output",
        wrapped(lambda: nn.Linear(4, 5), hooked_at_node),
        given((3, 4)),
    ),
    Case("module hooks on a layer's backward", layer_with_backward_hooks, given((3, 4))),
]

IN_PLACE = [
    Case(
        "relu_ after a linear layer",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(True)),
        given((3, 4)),
    ),
    Case(
        "relu_ after a linear layer on 3-D input",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(True), nn.Linear(5, 2)),
        given((2, 3, 4)),
    ),
    Case(
        "relu_ after a conv2d",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.Conv2d(4, 2, 1)),
        given((2, 3, 5, 5)),
    ),
    Case(
        "add_ of a skip connection",
        wrapped(lambda: nn.Linear(4, 4), lambda a, x: a(x).add_(x).mul_(2)),
        given((3, 4)),
    ),
    Case(
        "add_ of a skip connection on 3-D input",
        wrapped(lambda: nn.Linear(4, 4), lambda a, x: a(x).add_(x).mul_(2)),
        given((2, 3, 4)),
    ),
    Case(
        "in-place on a view of a layer's output",
        wrapped(lambda: nn.Linear(4, 5), in_place_on_a_view),
        given((3, 4)),
    ),
    Case(
        "in-place on a view of a layer's 3-D output",
        wrapped(lambda: nn.Linear(4, 5), in_place_on_a_view),
        given((2, 3, 4)),
    ),
    Case("parameters written into an activation", raw(write_rows, v=(3,), w=(4,)), given((3, 4))),
    Case(
        "layer written into a buffer",
        wrapped(
            lambda: [nn.Linear(4, 3), nn.Linear(4, 3)],
            lambda a, b, x: (
                torch.zeros(5, 6).index_copy_(1, torch.arange(3), a(x)).slice_scatter(b(x), 1, 3)
            ),
        ),
        given((5, 4)),
    ),
    Case(
        "a raw product changed in place",
        raw(lambda s, x: (x @ s.w).add_(s.b).relu_(), b=(3,), w=(4, 3)),
        given((5, 4)),
    ),
    Case(
        "addmm_ onto a layer's output",
        raw(lambda s, x: F.linear(x, s.a).addmm_(x, s.w, beta=2), a=(3, 4), w=(4, 3)),
        given((5, 4)),
    ),
]

CASES = WITHOUT_INPUTS + SEVERAL + SHARING + IN_PLACE

"""Settling: adding terms to parameters' gradients, and finishing as autograd would.

[1] A parameter without hooks takes its terms directly: they are computed, summed up if there
    are several, and added to the gradient. This is how autograd adds, so the rounding is the same.
[2] All else goes through a pass of autograd's own engine, so that tensor hooks,
    post-accumulate-grad hooks and the accumulator hooks that data-parallel reducers
    rely on run in their order, once, with the gradient in place.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.backward.terms import Term, value_of
from penstock.torch_private import (
    foreach_add_,
    post_accumulate_hooks,
    set_tensor_hooks,
    tensor_hooks,
)

Terms: TypeAlias = list[tuple[Tensor, Term]]
"""Each with the parameter that it is a piece of the gradient of."""

Tails: TypeAlias = list[tuple[GradientEdge, Term]]
"""Each with the place in the graph that it arrives at: from there autograd carries it on."""

PLAIN_TYPES = (torch.nn.Parameter, Tensor)
"""The classes whose values are all that there is to them."""
# Below this size a call costs more than the addition, so small ones share a call.
_FEW_ELEMENTS = 2**14


def is_plain(tensor: Tensor) -> bool:
    """Whether the kernels for dense tensors apply: no subclass, no sparse layout."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided


def carry_on(tails: Tails, params: Iterable[Tensor], *, retain_graph: bool = False) -> Terms:
    """Run the graph from where it was left to the parameters; none of their hooks runs."""
    edges: Any = [edge for edge, _ in tails]
    grads = [value_of(term) for _, term in tails]
    asked = [param for param in params if param.requires_grad]
    with hooks_put_off(asked):
        found = torch.autograd.grad(
            edges, asked, grads, retain_graph=retain_graph, allow_unused=True
        )
    return [(p, g) for p, g in zip(asked, found, strict=True) if g is not None]


@contextmanager
def hooks_put_off(params: Sequence[Tensor]) -> Iterator[None]:
    """Take tensor hooks off the parameters: they belong to settling, a pass would run them."""
    hooked = [(param, hooks) for param in params if (hooks := tensor_hooks(param))]
    for param, _ in hooked:
        set_tensor_hooks(param, None)
    try:
        yield
    finally:
        for param, hooks in hooked:
            set_tensor_hooks(param, hooks)


def settle(terms: Terms, *, signal_accumulators: bool) -> None:
    """Add every term to the `.grad` of its parameter, and run the parameters' hooks.

    `signal_accumulators`: give every parameter a part in [2], if only a signal, because
    hooks that cannot be seen from here may wait on its accumulator.
    """
    plain: Terms = []
    delivery = _Delivery()
    with torch.no_grad():
        for param, term in terms:
            if _adds_plainly(param, param.grad):
                plain.append((param, term))
            else:
                delivery.add(param, value_of(term))
        # First, since autograd may have let a sparse gradient share memory with a dense one.
        delivery.run()  # [2]
        _add_plainly(plain)  # [1]
        if signal_accumulators:
            signals = _Delivery()
            for param, _ in plain:
                signals.add(param, None)
            signals.run()  # [2]


def _add_plainly(terms: Terms) -> None:
    sums = _Sums()
    for param, own in _by_parameter(terms):
        grad = param.grad
        if grad is None:
            param.grad = _first_grad(param, own)
        elif grad.layout is not torch.strided:  # A sparse term came first.
            param.grad = _total(own) + grad
        else:
            sums.add(grad, _total(own))
    sums.run()


def _by_parameter(terms: Terms) -> Iterable[tuple[Tensor, Sequence[Term]]]:
    """Each parameter once, with its terms in their order."""
    found: dict[int, tuple[Tensor, list[Term]]] = {}
    for param, term in terms:
        if (known := found.get(id(param))) is None:
            found[id(param)] = param, [term]
        else:
            known[1].append(term)
    return found.values()


def _total(terms: Sequence[Term]) -> Tensor:
    """Return the sum of the terms, in their order; a tensor that came as such may be shared."""
    total = value_of(terms[0])
    for term in terms[1:]:
        value = value_of(term)
        is_dense = total.layout is torch.strided  # Only what is dense can have more added to it.
        total = total + value if is_dense else value + total
    return total


def _adds_plainly(param: Tensor, grad: Tensor | None) -> bool:
    """Whether no hook and no unusual layout asks for autograd's own way of adding."""
    if tensor_hooks(param) or post_accumulate_hooks(param):
        return False
    if param.grad_dtype is not param.dtype:
        return False
    return type(param) in PLAIN_TYPES and (grad is None or is_plain(grad))


def _first_grad(param: Tensor, terms: Sequence[Term]) -> Tensor:
    """The gradient of a parameter that has none: its own memory, laid out as autograd does."""
    value = _total(terms)
    if value is terms[0]:
        value = value.clone()
    if value.layout is not torch.strided:
        return value
    if value.dtype == param.dtype and value.stride() == param.stride():
        return value
    return torch.empty_like(param).copy_(value)


class _Sums:
    """Additions of which the small ones are gathered, to be done in one call.

    Large ones are done at once: the products of all weights would not fit together.
    """

    __slots__ = ("_grads", "_values")

    def __init__(self) -> None:
        self._grads: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, grad: Tensor, value: Tensor) -> None:
        is_small = value.numel() <= _FEW_ELEMENTS
        if is_small and value.dtype is grad.dtype and is_plain(value):
            self._grads.append(grad)
            self._values.append(value)
        else:
            grad.add_(value)

    def run(self) -> None:
        if self._grads:
            foreach_add_(self._grads, self._values)


class _Delivery:
    """Parameters, each once, with what their accumulators are to receive."""

    __slots__ = ("_places", "grads", "params")

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor | None] = []
        self._places: dict[int, int] = {}

    def add(self, param: Tensor, grad: Tensor | None) -> None:
        place = self._places.setdefault(id(param), len(self.params))
        if place == len(self.params):
            self.params.append(param)
            self.grads.append(grad)
        elif grad is not None:
            so_far = self.grads[place]
            self.grads[place] = grad if so_far is None else so_far + grad

    def run(self) -> None:
        if not self.params:
            return
        with torch.enable_grad():
            signal: Tensor = _Deliver.apply(  # type: ignore[no-untyped-call]  # torch's is untyped
                self.grads, *self.params
            )
        torch.autograd.backward(signal, torch.ones_like(signal))


class _Deliver(torch.autograd.Function):
    """Hands each accumulator its gradient, or None where that was added already."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.grads)

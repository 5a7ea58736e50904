"""Settling: adding terms to parameters' gradients, and finishing as autograd would.

[1] A parameter without hooks takes its terms directly: they are computed, summed if there
    are several, and added to the gradient. Autograd adds the same way, so the rounding is equal.
[2] Everything else goes through a pass of autograd's own engine. It runs tensor hooks,
    post-accumulate-grad hooks and the accumulator hooks that data-parallel reducers
    rely on in their order, once, with the gradient in place.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.backward.terms import Term, Total, value_of
from penstock.torch_private import (
    FakeTensor,
    foreach_add_,
    grad_and_hooks,
    is_dtensor,
    set_grad_mode,
    set_tensor_hooks,
    tensor_hooks,
)

Terms: TypeAlias = list[tuple[Tensor, Term]]
"""Terms, each with the parameter whose gradient it is a part of."""

Tails: TypeAlias = list[tuple[GradientEdge, Term]]
"""Terms, each with the edge in the graph where it arrives: autograd continues from there."""

PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)
"""The classes of tensors that have nothing but their values; in a dry run, not even these."""
# Up to this size a call costs more than the addition, so small additions share a call.
_FEW_ELEMENTS = 2**14


def is_plain(tensor: Tensor) -> bool:
    """Return whether the kernels for dense tensors apply: no subclass, no sparse layout."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided


def carry_on(tails: Tails, params: Iterable[Tensor], *, retain_graph: bool = False) -> Terms:
    """Run the rest of the graph, from the tails to the parameters, without their hooks."""
    edges: Any = [edge for edge, _ in tails]
    grads = [value_of(term) for _, term in tails]
    asked = [param for param in params if param.requires_grad]
    with HooksPutOff(asked):
        found = torch.autograd.grad(
            edges, asked, grads, retain_graph=retain_graph, allow_unused=True
        )
    return [(p, g) for p, g in zip(asked, found, strict=True) if g is not None]


class HooksPutOff:
    """A context without the parameters' tensor hooks: a pass would run them, but settling must."""

    __slots__ = ("_hooked",)

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._hooked = [(param, hooks) for param in params if (hooks := tensor_hooks(param))]

    def __enter__(self) -> None:
        for param, _ in self._hooked:
            set_tensor_hooks(param, None)

    def __exit__(self, *error: object) -> None:
        for param, hooks in self._hooked:
            set_tensor_hooks(param, hooks)


def settle(
    terms: Terms, *, signal_accumulators: bool, recheck: Callable[[], None] = lambda: None
) -> None:
    """Add every term to the `.grad` of its parameter, and run the parameters' hooks.

    `signal_accumulators`: include every parameter in [2], at least with a signal, because
    hooks that cannot be seen from here may wait for its accumulator.
    `recheck` raises an error if a hook, such as that of an optimizer, has changed what terms need.
    """
    settle_all([(terms, False)], signal_accumulators=signal_accumulators, recheck=recheck)


def settle_all(
    batches: Iterable[tuple[Sequence[tuple[Tensor, Term]], bool]],
    *,
    signal_accumulators: bool,
    recheck: Callable[[], None],
) -> None:
    """Settle one batch after another; no parameter is in two of them.

    A batch says whether nobody else holds its terms that are tensors.
    """
    have_hooks_run = False
    was_enabled = torch.is_grad_enabled()
    set_grad_mode(False)
    try:
        for terms, are_ours in batches:
            if have_hooks_run:
                recheck()
            have_hooks_run |= _settle(terms, are_ours, signal_accumulators, recheck)
    finally:
        set_grad_mode(was_enabled)


def _settle(
    terms: Sequence[tuple[Tensor, Term]],
    are_ours: bool,
    signal_accumulators: bool,
    recheck: Callable[[], None],
) -> bool:
    """Settle a batch; return whether hooks may have run."""
    plain: Terms = []
    grads: list[Tensor | None] = []
    delivery = _Delivery()
    for entry in terms:
        param, term = entry
        grad, hooks, late_hooks = grad_and_hooks(param)
        is_usual = (  # Asked first, without a call.
            grad is not None
            and type(grad) in PLAIN_TYPES
            and type(param) in PLAIN_TYPES
            and grad.dtype is param.dtype
            and grad.layout is torch.strided
        )
        if hooks or late_hooks or not (is_usual or _adds_plainly(param, grad)):
            delivery.add(param, value_of(term))
        else:
            plain.append(entry)
            grads.append(grad)
    # First, since autograd may have let a sparse gradient share memory with a dense one.
    if delivery.params:
        delivery.run()  # [2]
        recheck()
        grads = [param.grad for param, _ in plain]  # Hooks may have replaced it.
    _add_plainly(plain, grads, are_ours)  # [1]
    if signal_accumulators:
        signal(param for param, _ in plain)  # [2]
    return signal_accumulators or bool(delivery.params)


def signal(params: Iterable[Tensor]) -> None:
    """Run the hooks on the accumulators of parameters, but not their own, and add nothing."""
    signals = _Delivery()
    for param in params:
        signals.add(param, None)
    with HooksPutOff(signals.params):
        signals.run()


def _add_plainly(terms: Terms, grads: Sequence[Tensor | None], are_ours: bool) -> None:
    """Add terms to the gradients of their parameters without autograd, small ones in one call.

    Large ones are added immediately: the products of all weights together would not fit.
    """
    if len(set(map(id, map(_param_of, terms)))) < len(terms):
        terms = _by_parameter(terms)
        grads = [param.grad for param, _ in terms]
    small: list[Tensor] = []
    values: list[Tensor] = []
    for (param, term), grad in zip(terms, grads, strict=True):
        value = term if isinstance(term, Tensor) else term.value()
        if grad is None:
            is_ours = are_ours or value is not term
            param.grad = _first_grad(param, value, is_ours=is_ours)
        elif grad.layout is not torch.strided:  # A sparse term came first.
            param.grad = value + grad
        elif (
            type(value) in PLAIN_TYPES
            and value.dtype is grad.dtype
            and value.numel() <= _FEW_ELEMENTS
            and value.layout is torch.strided
        ):
            small.append(grad)
            values.append(value)
        else:
            grad.add_(value)
    if small:
        foreach_add_(small, values)


_param_of: Callable[[tuple[Tensor, Term]], Tensor] = itemgetter(0)


def _by_parameter(terms: Terms) -> Terms:
    """Return each parameter once, with its term or the sum of its terms."""
    found: dict[int, tuple[Tensor, list[Term]]] = {}
    for param, term in terms:
        found.setdefault(id(param), (param, []))[1].append(term)
    return [(param, own[0] if len(own) == 1 else Total(own)) for param, own in found.values()]


def _adds_plainly(param: Tensor, grad: Tensor | None) -> bool:
    """Return whether we can add without autograd if there are no hooks, by class and layout."""
    if (grad is None or grad.dtype is not param.dtype) and param.grad_dtype is not param.dtype:
        return False
    if type(param) in PLAIN_TYPES:
        return grad is None or is_plain(grad)
    return is_dtensor(param) and (grad is None or is_dtensor(grad))


def _first_grad(param: Tensor, value: Tensor, *, is_ours: bool) -> Tensor:
    """Return the first gradient of a parameter, in its own memory, laid out as autograd does.

    `is_ours`: nobody else holds the value.
    """
    if is_dtensor(value):
        if is_ours and value.dtype == param.dtype and value.stride() == param.stride():
            return value
        # As autograd does it: `clone` would reduce a partial gradient.
        return value.new_empty_strided(param.shape, param.stride(), dtype=param.dtype).copy_(value)
    if not is_ours:
        value = value.clone()
    if value.layout is not torch.strided:
        return value
    if value.dtype == param.dtype and value.stride() == param.stride():
        return value
    return torch.empty_like(param).copy_(value)


class _Delivery:
    """Parameters, each once, with the gradients that their accumulators will receive."""

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
            self.grads[place] = grad if so_far is None else _sum_for(param, so_far, grad)

    def run(self) -> None:
        if not self.params:
            return
        with torch.enable_grad():
            signal: Tensor = _Deliver.apply(  # type: ignore[no-untyped-call]  # torch's is untyped
                self.grads, *self.params
            )
        torch.autograd.backward(signal, torch.ones_like(signal))


def _sum_for(param: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return a sum as the parameter's accumulator gets it: both in its dtype, if it has one."""
    dtype = param.grad_dtype
    return first + second if dtype is None else first.to(dtype) + second.to(dtype)


class _Deliver(torch.autograd.Function):
    """A function whose backward gives each accumulator its gradient, or None if already added."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.grads)

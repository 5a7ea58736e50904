"""Leaf modules that defer their own weight gradients: linear layers and convolutions.

In an engine's forward they run on detached weights, so that autograd has no weight
gradient to compute, and leave a *tap*: their input, and the node at which their output's
gradient will arrive.

A tap that holds the input keeps it alive. Under saved-tensor hooks (checkpointing,
offloading) that is what the user wants to avoid. There, an identity node before the module
saves the input as autograd normally does, and hands it to the tap during the backward.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.compiler import is_compiling

from penstock.backward.settling import PLAIN_TYPES, Terms, is_plain
from penstock.backward.sharded_products import (
    can_multiply_rows,
    is_sharded,
    product_of,
    shard_of,
    shares_memory,
)
from penstock.backward.terms import (
    ConvolutionGeometry,
    ConvolutionGrads,
    Part,
    RowProduct,
    SumTo,
    Term,
    is_column_major,
    modified,
)
from penstock.backward.wrappers import is_compiled
from penstock.errors import BackwardError
from penstock.torch_private import (
    is_any_autocast_enabled,
    is_async_tensor,
    is_in_forward_mode,
    own_parameters,
    peek_interpreter_stack,
    shape_fused_product,
    top_saved_tensors_hooks,
    unsafe_view,
    version_of,
)

ForwardFunction: TypeAlias = Callable[..., Tensor]


class Sink:
    """The list in which leaf modules leave their taps; `taps` is None while no forward runs.

    `owner` is the token of the pass whose forward or backward is running. `is_wary`: make
    taps that refuse any backward that does not come from their own pass.
    """

    __slots__ = ("is_wary", "owner", "taps")

    def __init__(self) -> None:
        self.taps: list[Tap] | None = None
        self.owner: object = None
        self.is_wary = True

    def refusal_unless(self, owner: object) -> Callable[[object], None]:
        """Return a pre-hook that refuses a backward that is not the owner's."""

        def refuse(_: object) -> None:
            if self.taps is not None or self.owner is not owner:
                raise _not_from_here()

        return refuse


def _not_from_here() -> BackwardError:
    return BackwardError(
        "a backward reached the graph of a SplitEngine's forward, which does not contain the "
        "weights, but not through that forward's own PendingBackward. Call its backward_input() "
        "or backward(), with a loss computed from its own outputs. A module that differentiates "
        "itself in its forward needs stage_backward_input and stage_backward_weight instead."
    )


class Call(NamedTuple):
    """The parameters of a leaf module's call; a linear layer has no geometry.

    `is_by_rows`: the weight of a linear layer is laid out by rows, as it usually is.
    `trains_bias`: the bias needed a gradient in the forward.
    """

    weight: Tensor
    bias: Tensor | None
    is_by_rows: bool
    trains_bias: bool
    geometry: ConvolutionGeometry | None = None

    def run(self, x: Tensor) -> Tensor:
        """Return the module's output for `x`, with the parameters hidden from autograd."""
        weight = self.weight.detach()
        bias = None if self.bias is None else self.bias.detach()
        if weight.dtype is not x.dtype:
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        if self.geometry is not None:
            return self.geometry.forward(x, weight, bias)
        return nn.functional.linear(x, weight, bias)

    def add_terms(self, grad: Tensor, x: Tensor, terms: Terms) -> None:
        """Add the terms of the parameters, where `grad` is the gradient of the output for `x`."""
        weight, bias, is_by_rows, trains_bias, geometry = self
        bias = bias if bias is not None and trains_bias and bias.requires_grad else None
        trains_weight = weight.requires_grad  # It may have been switched off after the forward.
        if geometry is None:
            if trains_weight:
                terms.append((weight, _linear_product(grad, x, is_by_rows)))
            if bias is not None:
                terms.append((bias, SumTo(grad, bias.shape)))
        else:
            of_parameters = trains_weight, bias is not None
            grads = ConvolutionGrads(grad, x, weight.detach(), geometry, of_parameters)
            if trains_weight:
                terms.append((weight, Part(grads, 0)))
            if bias is not None:
                terms.append((bias, Part(grads, 1)))


def _linear_product(grad: Tensor, x: Tensor, is_by_rows: bool) -> Term:
    """Return the gradient of a linear layer's weight, by the formula that autograd uses."""
    if type(grad) in PLAIN_TYPES:
        return RowProduct(grad, x, not is_by_rows)
    if is_by_rows:
        return product_of(grad.t(), x)
    return product_of(x.t(), grad, is_transposed=True)


class _Place:
    """An input that is not simply held: one that the backward delivers, or a DTensor.

    `shard`: the user's part of a DTensor; it is watched for changes in place, as the DTensor's
    version does not show them.
    """

    __slots__ = ("shard", "version", "x")

    def __init__(self, x: Tensor | None = None, shard: Tensor | None = None) -> None:
        self.x = x
        self.shard = shard
        self.version = 0 if x is None else self.version_of(x)

    def version_of(self, x: Tensor) -> int:
        return version_of(x) if self.shard is None else version_of(x) + version_of(self.shard)


Tap: TypeAlias = tuple[Node, Call, Tensor | _Place, int]
"""One call of a leaf module: the node at which the gradient of its output will arrive, the call,
its input, and the input's version in the forward. A tuple, since one is made for every call."""


def add_terms(tap: Tap, grad: Tensor, terms: Terms) -> tuple[Tensor, ...]:
    """Add the terms for the gradient that arrived; return the tensors that they need."""
    _, call, held, version = tap
    if isinstance(held, Tensor):
        if version_of(held) != version:
            raise modified(held, after="forward", before="input backward")
        call.add_terms(grad, held, terms)
        return held, grad
    x, held.x = held.x, None  # The graph holds the place as well, and may live on.
    if x is None:
        raise BackwardError(
            f"a layer with a weight of shape {tuple(call.weight.shape)}, in a "
            "checkpointed or offloaded region, does not depend on an input or a parameter of "
            "the stage, but on another tensor that requires a gradient. Expected such a "
            "tensor to be a parameter: register it as one."
        )
    if held.version_of(x) != held.version:
        raise modified(x, after="forward", before="input backward")
    call.add_terms(grad, x, terms)
    shard, held.shard = held.shard, None
    return (x, grad) if shard is None else (x, grad, shard)


class _Keep(torch.autograd.Function):
    """An identity that saves its input as autograd does, and hands it over in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _Place) -> Tensor:
        ctx.save_for_backward(x)
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.place.x, ctx.place.version = x.detach(), version_of(x)
        return grad, None


class LeafModule(NamedTuple):
    """A module that can defer its weight gradients, with this forward in place of its own."""

    module: nn.Module
    params: "_Params"
    forward: ForwardFunction


def find_leaf_modules(root: nn.Module, sink: Sink) -> list[LeafModule]:
    """Return every leaf module under `root` that can defer its weight gradients."""
    found: list[LeafModule] = []
    for module in dict.fromkeys(_modules(root)):
        if "forward" in module.__dict__:
            continue
        if type(module).forward is nn.Linear.forward:
            params = _Params(module, may_shard=True)
            found.append(LeafModule(module, params, _linear(module, params, sink)))
        elif type(module).forward in _CONVOLUTIONS:
            params = _Params(module, may_shard=False)
            found.append(LeafModule(module, params, _convolution(module, params, sink)))
    return found


_CONVOLUTIONS = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


def _is_zero_padded(module: Any) -> bool:
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and all below it, except compiled ones, whose forward must not change."""
    if is_compiled(module):
        return
    yield module
    for child in module.children():
        yield from _modules(child)


class _Params:
    """A module's own weight and bias, if we can compute their gradients ourselves.

    `may_shard`: also if both are DTensors.
    """

    __slots__ = ("_bias", "_call", "_may_shard", "_params", "_weight")

    def __init__(self, module: nn.Module, *, may_shard: bool) -> None:
        self._params = own_parameters(module)
        self._may_shard = may_shard
        self.refresh()

    def refresh(self) -> None:
        """Look at the parameters again: they may have been converted in place."""
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._call: Call | None = None

    def get(self) -> Call | None:
        """Return weight and bias; None if they are computed, of several types, or of a subclass."""
        weight, bias = self._params.get("weight"), self._params.get("bias")
        if weight is not self._weight or bias is not self._bias:  # replaced, or not seen before
            self._weight, self._bias = weight, bias
            self._call = self._make_call(weight, bias)
        call = self._call
        if call is None or not call.weight.requires_grad:
            return None
        if bias is not None and bias.requires_grad is not call.trains_bias:
            call = self._call = self._make_call(weight, bias)
        return call

    def _make_call(self, weight: Tensor | None, bias: Tensor | None) -> Call | None:
        if weight is None or weight.dim() < 2 or "bias" not in self._params:  # Parametrised.
            return None
        is_known = is_sharded if self._may_shard and is_sharded(weight) else is_plain
        are_ours = all(
            p.is_leaf and is_known(p) and not p.is_complex() and p.dtype is weight.dtype
            for p in (weight, bias)
            if p is not None
        )
        if not are_ours:
            return None
        # The right factor of the product is the transpose.
        is_by_rows = is_column_major(weight.shape[::-1], weight.stride()[::-1])
        return Call(weight, bias, is_by_rows, bias is not None and bias.requires_grad)


def _linear(module: nn.Module, params: _Params, sink: Sink) -> ForwardFunction:
    original = module.forward

    def forward(input: Tensor) -> Tensor:
        x = input  # Callers may use the module's own keyword.
        if is_compiling():  # In a function that the user compiles.
            return original(x)  # type: ignore[no-any-return]  # a module's forward is untyped
        call = params.get()
        if call is not None and sink.taps is not None and _is_usual(call, x, sink):
            out = call.run(x)
            node = _inner_product(out)
            if node is not None:
                sink.taps.append((node, call, x.detach(), version_of(x)))
                return out
        hooked = _are_saves_hooked()
        if call is None or not _can_defer(call.weight, x, sink, hooked):
            return original(x)  # type: ignore[no-any-return]  # a module's forward is untyped
        return _run_linear(call, x, sink, hooked)

    return forward


def _is_usual(call: Call, x: Tensor, sink: Sink) -> bool:
    """Return whether a linear layer's call needs nothing but its product: see `_run_linear`.

    Most calls are such, so few steps are made for them.
    """
    weight = call.weight
    return (
        x.requires_grad
        and type(x) in PLAIN_TYPES
        and type(weight) in PLAIN_TYPES
        and x.layout is torch.strided
        and x.dtype is weight.dtype
        and x.dim() > 2
        and x.is_contiguous()
        and not sink.is_wary
        and torch.is_grad_enabled()
        and top_saved_tensors_hooks(False) is None
        and peek_interpreter_stack() is None
        and not is_in_forward_mode()
        and not is_any_autocast_enabled()
    )


def _run_linear(call: Call, x: Tensor, sink: Sink, are_saves_hooked: bool) -> Tensor:
    """Return the output of a linear layer, as torch's own computes it.

    Unless torch's fuses the bias into the product, it adds the bias last, and rounds once more.
    """
    is_ordinary = type(x) in PLAIN_TYPES
    shard = None if is_ordinary else shard_of(x)
    if x.dim() == 2 or (is_ordinary and x.dim() > 2 and x.is_contiguous()):
        out = _run_deferred(call, x, sink, are_saves_hooked, shard)
        return out if _inner_product(out) is not None else _no_view(out, out.shape)
    bias = call.bias
    is_fused = bias is not None and x.is_contiguous()
    if not is_fused:
        call = Call(call.weight, None, call.is_by_rows, False)
    out = _run_deferred(call, x.reshape(-1, x.shape[-1]), sink, are_saves_hooked, shard)
    shape = (*x.shape[:-1], out.shape[-1])
    if is_fused:
        return shape_fused_product(out, shape)
    result = _no_view(out, shape)
    if bias is None:
        return result
    bias = bias.to(result.dtype)
    return result.add_(bias) if is_plain(result) else result + bias


def _convolution(module: Any, params: _Params, sink: Sink) -> ForwardFunction:
    original = module.forward

    def forward(input: Tensor) -> Tensor:
        x = input  # Callers may use the module's own keyword.
        if is_compiling():  # In a function that the user compiles.
            return original(x)  # type: ignore[no-any-return]  # a module's forward is untyped
        call = params.get()
        hooked = _are_saves_hooked()
        is_usual = call is not None and x.dim() == call.weight.dim() and _is_zero_padded(module)
        if call is None or not is_usual or not _can_defer(call.weight, x, sink, hooked):
            return original(x)  # type: ignore[no-any-return]  # a module's forward is untyped
        geometry = ConvolutionGeometry(
            module.stride,
            module.padding,
            module.dilation,
            module.transposed,
            module.output_padding,
            module.groups,
        )
        own = Call(*call[:-1], geometry)
        out = _run_deferred(own, x, sink, hooked)
        return _no_view(out, out.shape)

    return forward


def _can_defer(weight: Tensor, x: Tensor, sink: Sink, are_saves_hooked: bool) -> bool:
    """Return whether we compute this call's weight gradient, rather than autograd."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return False
    if type(weight) in PLAIN_TYPES:
        if not (is_plain(x) or is_async_tensor(x)):
            return False
    elif not can_multiply_rows(x, weight):
        return False
    if weight.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
        return False
    if peek_interpreter_stack() is not None or is_in_forward_mode():  # As in torch.func.vjp.
        return False
    return are_saves_hooked or sink.taps is not None


def _run_deferred(
    call: Call, x: Tensor, sink: Sink, are_saves_hooked: bool, shard: Tensor | None = None
) -> Tensor:
    """Return the call's output. Do not return it to users if its node is that of the product.

    That node must not get their hooks.
    `shard`: the user's part of the DTensor that `x` is a view of.
    """
    if is_any_autocast_enabled():
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
    held: Tensor | _Place
    version = 0
    if are_saves_hooked:
        held = _Place()
        keep: ForwardFunction = _Keep.apply
        out = call.run(keep(x, held))
    else:
        held = x.detach()
        if type(x) in PLAIN_TYPES:
            version = version_of(x)
        else:  # If it is a copy, the user may overwrite the shard.
            is_shared = shard is not None and shares_memory(x, shard)
            held = _Place(held, shard if is_shared else None)
        out = call.run(x)
    if sink.taps is not None:  # Otherwise a recomputation, whose graph nobody runs.
        node = _inner_product(out) or out.grad_fn
        assert node is not None  # `_can_defer` makes sure of it.
        if sink.is_wary:
            node.register_prehook(sink.refusal_unless(sink.owner))
        sink.taps.append((node, call, held, version))
    return out


def _inner_product(out: Tensor) -> Node | None:
    """Return the node of the product of which `out` is a view, or None if it is none."""
    node = out.grad_fn
    if node is None or type(node) not in _VIEWS:
        return None
    inner = node.next_functions[0][0]
    return inner if type(inner) in _PRODUCTS else None


def _nodes_of_linear() -> Iterator[tuple[type, type]]:
    """Yield the types of a linear layer's last two nodes, with a bias and without."""
    x, weight = torch.empty(1, 1, 1, requires_grad=True), torch.empty(1, 1)
    for bias in (weight[0], None):
        last = nn.functional.linear(x, weight, bias).grad_fn
        assert last is not None
        yield type(last), type(last.next_functions[0][0])


_VIEWS, _PRODUCTS = zip(*_nodes_of_linear(), strict=True)


def _no_view(out: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `out` in another shape, from a new node; autograd does not treat it as a view."""
    result: Tensor = unsafe_view(out, shape)
    return result


def _are_saves_hooked() -> bool:
    """Return whether tensors that autograd saves now go through hooks (checkpoint, offload)."""
    return top_saved_tensors_hooks(False) is not None

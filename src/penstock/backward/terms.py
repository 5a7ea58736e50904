"""Terms: parts of a parameter's gradient that are not computed until W.

A term holds everything that it needs; dropping it frees what it holds. Its `value` is the
tensor, bit for bit equal to the result of autograd's own formula: the same kernel on the same
layouts. Which of two equal formulas autograd uses for a product depends on the layout of the
factor; we choose in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.errors import BackwardError
from penstock.torch_private import local_shard, version_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


class MatrixProduct:
    """`alpha * left @ right`, both 2-D or both batched; transposed if `is_transposed`."""

    __slots__ = ("_alpha", "_is_transposed", "_left", "_right")

    def __init__(
        self, left: Tensor, right: Tensor, alpha: float = 1, is_transposed: bool = False
    ) -> None:
        self._left = left
        self._right = right
        self._alpha = alpha
        self._is_transposed = is_transposed

    def value(self) -> Tensor:
        left, right = self._left, self._right
        product = torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)
        if self._alpha != 1:
            product = product.mul_(self._alpha)
        return product.t() if self._is_transposed else product


class RowProduct:
    """`grad.t() @ x`, both seen as matrices of rows; as `(x.t() @ grad).t()` if `is_transposed`."""

    __slots__ = ("_grad", "_is_transposed", "_x")

    def __init__(self, grad: Tensor, x: Tensor, is_transposed: bool) -> None:
        self._grad = grad
        self._x = x
        self._is_transposed = is_transposed

    def value(self) -> Tensor:
        grad, x = self._grad, self._x
        if x.dim() > 2:
            x = x.flatten(0, -2)
        if grad.dim() > 2:
            grad = grad.flatten(0, -2)
        return torch.mm(x.mT, grad).mT if self._is_transposed else torch.mm(grad.mT, x)


class ShardedProduct:
    """`alpha * left @ right` of DTensors, which each rank computes on its own shards.

    Shards that a collective is filling are waited for when the value is computed.
    """

    __slots__ = ("_is_transposed", "_left", "_placements", "_product", "_right")

    def __init__(
        self,
        left: "DTensor",
        right: "DTensor",
        placements: Sequence["Placement"],
        alpha: float = 1,
        *,
        is_transposed: bool = False,
    ) -> None:
        self._left = left
        self._right = right
        self._placements = placements
        self._product = MatrixProduct(local_shard(left), local_shard(right), alpha)
        self._is_transposed = is_transposed

    def value(self) -> Tensor:
        from torch.distributed.tensor import DTensor  # Loaded already: factors are DTensors.

        *batch, rows, _ = self._left.shape
        columns = self._right.shape[-1]
        product = DTensor.from_local(
            self._product.value(),
            self._left.device_mesh,
            self._placements,
            run_check=False,
            shape=torch.Size((*batch, rows, columns)),
            stride=(*(rows * columns for _ in batch), columns, 1),
        )
        return product.t() if self._is_transposed else product


def is_column_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a matrix is laid out by columns, by autograd's own test.

    If a factor of a product is, autograd computes the transpose of its gradient.
    """
    return strides[0] == 1 and strides[1] == shape[0]


class SumTo:
    """`beta * grad`, summed over the dimensions along which `shape` was broadcast."""

    __slots__ = ("_beta", "_grad", "_shape")

    def __init__(self, grad: Tensor, shape: Sequence[int], beta: float = 1) -> None:
        self._grad = grad
        self._shape = shape
        self._beta = beta

    def value(self) -> Tensor:
        grad, shape = self._grad, self._shape
        if self._beta != 1:
            grad = grad * self._beta
        # The bias of a linear layer: the same sum, in half the time for small tensors.
        is_row_sum = grad.dim() == 2 and len(shape) == 1 and shape[0] == grad.size(1)
        total = grad.sum(0) if is_row_sum else grad.sum_to_size(shape)
        return total.clone() if total is self._grad else total


@dataclass(frozen=True, slots=True)
class ConvolutionGeometry:
    """The arguments of a convolution except its tensors, named as in `torch.convolution`."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            x,
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, of_parameters: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the weight and the bias; None for one not in `of_parameters`."""
        num_channels = weight.shape[1] * self.groups if self.transposed else weight.shape[0]
        _, *grads = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            [num_channels],
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            (False, *of_parameters),
        )
        return grads[0], grads[1]


class ConvolutionGrads:
    """The gradients of a convolution's weight and bias, from one call as in autograd.

    Some kernels compute the two together, and round differently if only one is asked for.
    """

    __slots__ = ("_found", "_geometry", "_grad", "_of_parameters", "_weight", "_x")

    def __init__(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        geometry: ConvolutionGeometry,
        of_parameters: tuple[bool, bool],
    ) -> None:
        self._grad = grad
        self._x = x
        self._weight = weight
        self._geometry = geometry
        self._of_parameters = of_parameters
        self._found: list[Tensor | None] = [None, None]

    def take(self, which: int) -> Tensor:
        """Return the gradient of the weight (0) or the bias (1), and stop holding it."""
        if self._found[which] is None:
            weight, dtype = self._weight, self._x.dtype  # Autocast may have converted it.
            if weight.untyped_storage().size():
                weight = weight.to(dtype)
            else:  # Sharded, and freed already: its shape and layout are enough.
                weight = torch.empty_like(weight, dtype=dtype)
            found = self._geometry.backward(self._grad, self._x, weight, self._of_parameters)
            self._found = list(found)
        taken, self._found[which] = self._found[which], None
        assert taken is not None  # it was asked for
        return taken


class AbstractGrads(Protocol):
    """Several gradients that one call computes, when the first of them is taken."""

    def take(self, which: int) -> Tensor:
        """Return a gradient, and stop holding it."""


class Part:
    """One of several gradients that one call computes, such as those of a convolution."""

    __slots__ = ("_grads", "_which")

    def __init__(self, grads: AbstractGrads, which: int) -> None:
        self._grads = grads
        self._which = which

    def value(self) -> Tensor:
        return self._grads.take(self._which)


class Total:
    """The sum of several terms, in their order."""

    __slots__ = ("_terms",)

    def __init__(self, terms: Sequence["Term"]) -> None:
        self._terms = terms

    def value(self) -> Tensor:
        total = value_of(self._terms[0])
        for term in self._terms[1:]:
            value = value_of(term)
            is_dense = total.layout is torch.strided  # A sparse tensor cannot be left of a dense.
            total = total + value if is_dense else value + total
        return total


Term: TypeAlias = MatrixProduct | RowProduct | ShardedProduct | SumTo | Part | Total | Tensor
"""One part of a gradient. A tensor was already computed by autograd; others may hold it too."""


def value_of(term: Term) -> Tensor:
    return term if isinstance(term, Tensor) else term.value()


class Unmodified:
    """The versions of tensors that W will need, to detect whether any was changed in place."""

    __slots__ = ("_versions", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._versions = _versions(tensors)

    def check(self) -> None:
        now = _versions(self.tensors)
        if now != self._versions:
            changed = zip(self.tensors, now, self._versions, strict=True)
            tensor = next(tensor for tensor, new, old in changed if new != old)
            raise modified(tensor, after="input backward", before="weight backward")


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return list(map(version_of, tensors))
    except RuntimeError:  # Inference tensors have none.
        return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


NOTHING_NEEDED = Unmodified([])


def modified(tensor: Tensor, *, after: str, before: str) -> BackwardError:
    return BackwardError(
        f"an activation or gradient of shape {tuple(tensor.shape)} that the {before} needs was "
        f"modified in place after the {after}. Expected it to stay unchanged until the {before} "
        "has run: give each microbatch its own buffers."
    )

"""Terms: pieces of a parameter's gradient whose computing is put off until W.

A term holds all it needs and has not been computed; dropping it frees what it holds. Its
`value` is the tensor. A matrix product can also be added to a gradient in one operation,
which plain autograd cannot do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.errors import BackwardError


class MatrixProduct:
    """`alpha * left @ right`, both 2-D or both batched."""

    __slots__ = ("_alpha", "_left", "_right")

    def __init__(self, left: Tensor, right: Tensor, alpha: float = 1) -> None:
        self._left = left
        self._right = right
        self._alpha = alpha

    def value(self) -> Tensor:
        product = torch.matmul(self._left, self._right)
        return product if self._alpha == 1 else product.mul_(self._alpha)

    def add_to(self, grad: Tensor) -> None:
        if grad.dtype != self._left.dtype:
            grad.add_(self.value())
        elif grad.dim() == 2:
            grad.addmm_(self._left, self._right, alpha=self._alpha)
        else:
            grad.baddbmm_(self._left, self._right, alpha=self._alpha)


class SumTo:
    """`beta * grad`, summed over the dimensions along which `shape` was broadcast."""

    __slots__ = ("_beta", "_grad", "_shape")

    def __init__(self, grad: Tensor, shape: Sequence[int], beta: float = 1) -> None:
        self._grad = grad
        self._shape = shape
        self._beta = beta

    def value(self) -> Tensor:
        grad, shape = self._grad, self._shape
        # The bias of a linear layer: the same sum, in half the time for small tensors.
        is_row_sum = grad.dim() == 2 and len(shape) == 1 and shape[0] == grad.shape[1]
        total = grad.sum(0) if is_row_sum else grad.sum_to_size(shape)
        if self._beta != 1:
            return total * self._beta
        return total.clone() if total is grad else total


@dataclass(frozen=True, slots=True)
class ConvolutionGeometry:
    """How a convolution was called, but for its tensors; names as in `torch.convolution`."""

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

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, *, of_input: bool) -> Tensor:
        """The gradient of the input, or else of the weight."""
        both = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            (of_input, not of_input, False),
        )
        result: Tensor = both[0] if of_input else both[1]
        return result


class ConvolutionProduct:
    """The weight gradient of a convolution."""

    __slots__ = ("_geometry", "_grad", "_weight", "_x")

    def __init__(
        self, grad: Tensor, x: Tensor, weight: Tensor, geometry: ConvolutionGeometry
    ) -> None:
        self._grad = grad
        self._x = x
        self._weight = weight
        self._geometry = geometry

    def value(self) -> Tensor:
        return self._geometry.backward(self._grad, self._x, self._weight, of_input=False)


Term: TypeAlias = MatrixProduct | SumTo | ConvolutionProduct | Tensor
"""A tensor is a gradient that autograd has computed already; others may hold it too."""


def value_of(term: Term) -> Tensor:
    return term if isinstance(term, Tensor) else term.value()


def convolution_bias(grad: Tensor, shape: Sequence[int]) -> SumTo:
    """The bias gradient of a convolution: `grad` summed over all but the channels."""
    return SumTo(grad.movedim(1, -1), shape)


class Unmodified:
    """Remembers the state of tensors that W will need, to find out if someone wrote to them."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._versions = _versions(self._tensors)

    def check(self) -> None:
        now = _versions(self._tensors)
        if now != self._versions:
            changed = zip(self._tensors, now, self._versions, strict=True)
            tensor = next(tensor for tensor, new, old in changed if new != old)
            raise modified(tensor, after="input backward", before="weight backward")


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # Inference tensors have none.
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def modified(tensor: Tensor, *, after: str, before: str) -> BackwardError:
    return BackwardError(
        f"an activation or gradient of shape {tuple(tensor.shape)} that the {before} needs was "
        f"modified in place after the {after}. Expected it unchanged until the {before} has "
        "run: give each microbatch buffers of its own."
    )

"""Terms: pieces of a parameter's gradient whose computing is put off until W.

A term holds all it needs and has not been computed. It can be turned into a tensor
(`value`) or, cheaper, be added to a gradient in one fused
operation (`add_to`), which plain autograd cannot do. Dropping a term frees what it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.errors import BackwardError


class MatrixProduct:
    """`alpha * left @ right`, both 2-D or both batched."""

    __slots__ = ("_alpha", "_left", "_right", "_version")

    def __init__(self, left: Tensor, right: Tensor, alpha: float = 1) -> None:
        self._left = left
        self._right = right
        self._alpha = alpha
        self._version = left._version + right._version

    def value(self) -> Tensor:
        if self._left._version + self._right._version != self._version:
            raise modified("input backward", "weight backward", self._left, self._right)
        product = torch.matmul(self._left, self._right)
        return product if self._alpha == 1 else product.mul_(self._alpha)

    def add_to(self, grad: Tensor) -> None:
        if grad.dtype != self._left.dtype:
            grad.add_(self.value())
            return
        if self._left._version + self._right._version != self._version:
            raise modified("input backward", "weight backward", self._left, self._right)
        if grad.dim() == 2:
            grad.addmm_(self._left, self._right, alpha=self._alpha)
        else:
            grad.baddbmm_(self._left, self._right, alpha=self._alpha)


class SumTo:
    """`beta * grad`, summed over the dimensions along which `shape` was broadcast."""

    __slots__ = ("_beta", "_grad", "_shape", "_version")

    def __init__(self, grad: Tensor, shape: Sequence[int], beta: float = 1) -> None:
        self._grad = grad
        self._shape = shape
        self._beta = beta
        self._version = grad._version

    def value(self) -> Tensor:
        total = self._total()
        return total.clone() if total is self._grad else total

    def add_to(self, grad: Tensor) -> None:
        grad.add_(self._total())

    def _total(self) -> Tensor:
        if self._grad._version != self._version:
            raise modified("input backward", "weight backward", self._grad)
        grad, shape = self._grad, self._shape
        # The bias of a linear layer: the same sum, in half the time for small tensors.
        is_row_sum = grad.dim() == 2 and len(shape) == 1 and shape[0] == grad.shape[1]
        total = grad.sum(0) if is_row_sum else grad.sum_to_size(shape)
        return total if self._beta == 1 else total * self._beta


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

    __slots__ = ("_geometry", "_grad", "_version", "_weight", "_x")

    def __init__(
        self, grad: Tensor, x: Tensor, weight: Tensor, geometry: ConvolutionGeometry
    ) -> None:
        self._grad = grad
        self._x = x
        self._weight = weight
        self._geometry = geometry
        self._version = grad._version + x._version

    def value(self) -> Tensor:
        if self._grad._version + self._x._version != self._version:
            raise modified("input backward", "weight backward", self._grad, self._x)
        return self._geometry.backward(self._grad, self._x, self._weight, of_input=False)

    def add_to(self, grad: Tensor) -> None:
        grad.add_(self.value())


Term: TypeAlias = MatrixProduct | SumTo | ConvolutionProduct | Tensor
"""A tensor is a gradient that autograd has computed already; others may hold it too."""


def convolution_bias(grad: Tensor, shape: Sequence[int]) -> SumTo:
    """The bias gradient of a convolution: `grad` summed over all but the channels."""
    return SumTo(grad.movedim(1, -1), shape)


def modified(after: str, before: str, *tensors: Tensor) -> BackwardError:
    shapes = " or ".join(str(tuple(tensor.shape)) for tensor in tensors)
    return BackwardError(
        f"a tensor of shape {shapes} that the {before} needs was modified in place after the "
        f"{after}. Activations and gradients must stay as they are until the {before} has run: "
        "give each microbatch its own buffers."
    )

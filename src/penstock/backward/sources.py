"""Sources: autograd nodes whose weight gradients we compute ourselves, without the node.

A source is made from a node before the engine pass of I, which releases what the node
saved. Given the gradient that arrived at the node, it makes the terms of its weights.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.backward.settling import Tails, Terms, is_plain
from penstock.backward.sharded_products import has_known_placements, is_sharded, product_of
from penstock.backward.terms import (
    ConvolutionGeometry,
    ConvolutionGrads,
    Part,
    RowProduct,
    SumTo,
    Term,
    is_column_major,
)
from penstock.torch_private import (
    NODES,
    SavedTensor,
    grad_metadata,
    saved_addend_scale,
    saved_geometry,
    saved_scales,
)

Target: TypeAlias = Tensor | GradientEdge
"""The destination of a gradient: a parameter, or an edge in the graph that leads to some."""


class WeightWork(NamedTuple):
    """The work of W."""

    terms: Terms
    tails: Tails

    def add(self, target: Target, term: Term) -> None:
        if type(target) is GradientEdge:
            self.tails.append((target, term))
        else:
            self.terms.append((target, term))  # type: ignore[arg-type]  # it is a tensor


class Use(NamedTuple):
    """A use of something by edge number `edge` of a node; `transposed` if of its transpose."""

    edge: int
    transposed: bool


class Passage:
    """A source where the gradient that arrives is the target's own."""

    __slots__ = ("_target",)
    saved: Sequence[Tensor] = ()

    def __init__(self, target: Target) -> None:
        self._target = target

    def add_work(self, grad: Tensor, work: WeightWork) -> None:
        work.add(self._target, grad)


class LinearSource:
    """A node of `x @ weight.t() + bias`, by far the most frequent one; `x` is plain.

    `is_transposed`: autograd computes the transpose of the weight's gradient.
    """

    __slots__ = ("_bias", "_is_transposed", "_weight", "saved")

    def __init__(self, bias: Tensor, weight: Tensor, x: Tensor, is_transposed: bool) -> None:
        self._bias = bias
        self._weight = weight
        self._is_transposed = is_transposed
        self.saved = (x,)

    def add_work(self, grad: Tensor, work: WeightWork) -> None:
        bias = self._bias
        work.terms.append((bias, SumTo(grad, bias.shape)))
        work.terms.append((self._weight, RowProduct(grad, self.saved[0], self._is_transposed)))


class MatrixSource:
    """A node of `alpha * left @ right`, or of `beta * added + alpha * left @ right`.

    `is_transposed` says for the left and the right factor whether autograd computes the transpose
    of its gradient. `targets`: one for each use.
    """

    __slots__ = (
        "_alpha",
        "_beta",
        "_is_transposed",
        "_left",
        "_left_edge",
        "_right",
        "_targets",
        "_uses",
        "saved",
    )

    def __init__(
        self,
        uses: Sequence[Use],
        targets: Sequence[Target],
        left: Tensor | None,
        right: Tensor | None,
        left_edge: int,
        scales: tuple[float, float],
        is_transposed: tuple[bool, bool],
    ) -> None:
        self._uses = uses
        self._targets = targets
        self._left = left
        self._right = right
        self._left_edge = left_edge
        self._alpha, self._beta = scales
        self._is_transposed = is_transposed
        self.saved = [factor for factor in (left, right) if factor is not None]

    def add_work(self, grad: Tensor, work: WeightWork) -> None:
        for (edge, transposed), target in zip(self._uses, self._targets, strict=True):
            if edge < self._left_edge:
                work.add(target, SumTo(grad, _shape(target), self._beta))
                continue
            is_transposed = self._is_transposed[edge > self._left_edge]
            if edge > self._left_edge:  # The gradient of the right factor: left.mT @ grad
                left = self._left
                assert left is not None  # autograd saves what a differentiable factor needs
                first, second = (grad.mT, left) if is_transposed else (left.mT, grad)
            else:  # grad @ right.mT
                right = self._right
                assert right is not None
                first, second = (right, grad.mT) if is_transposed else (grad, right.mT)
            product = product_of(first, second, self._alpha, is_transposed != transposed)
            work.add(target, product)


class ConvolutionSource:
    """A node of a convolution; edge 1 is its weight, edge 2 its bias."""

    __slots__ = ("_geometry", "_targets", "_uses", "_weight", "_x", "saved")

    def __init__(
        self,
        uses: Sequence[Use],
        targets: Sequence[Target],
        x: Tensor,
        weight: Tensor,
        geometry: ConvolutionGeometry,
    ) -> None:
        self._uses = uses
        self._targets = targets
        self._x = x
        self._weight = weight
        self._geometry = geometry
        self.saved = [x]

    def add_work(self, grad: Tensor, work: WeightWork) -> None:
        asked = [use.edge for use in self._uses]
        grads = ConvolutionGrads(
            grad, self._x, self._weight, self._geometry, (1 in asked, 2 in asked)
        )
        for use, target in zip(self._uses, self._targets, strict=True):
            work.add(target, Part(grads, use.edge - 1))


class AdditionSource:
    """A node of `first + alpha * second`, one of them computed from parameters alone."""

    __slots__ = ("_alpha", "_targets", "_uses")
    saved: Sequence[Tensor] = ()

    def __init__(self, uses: Sequence[Use], targets: Sequence[Target], alpha: float) -> None:
        self._uses = uses
        self._targets = targets
        self._alpha = alpha

    def add_work(self, grad: Tensor, work: WeightWork) -> None:
        for use, target in zip(self._uses, self._targets, strict=True):
            scale = self._alpha if use.edge == 1 else 1
            work.add(target, SumTo(grad, _shape(target), scale))


Source: TypeAlias = Passage | LinearSource | MatrixSource | ConvolutionSource | AdditionSource


class _MatrixNode(NamedTuple):
    """How a kind of node saves its factors, and the edge of the left one."""

    left: SavedTensor
    right: SavedTensor
    left_edge: int
    is_2d: bool


_MATRIX_NODES = {
    NODES.MmBackward0: _MatrixNode(SavedTensor("self"), SavedTensor("mat2"), 0, True),
    NODES.BmmBackward0: _MatrixNode(SavedTensor("self"), SavedTensor("mat2"), 0, False),
    NODES.AddmmBackward0: _MatrixNode(SavedTensor("mat1"), SavedTensor("mat2"), 1, True),
    NODES.BaddbmmBackward0: _MatrixNode(SavedTensor("batch1"), SavedTensor("batch2"), 1, False),
}
SOURCE_KINDS = (*_MATRIX_NODES, NODES.ConvolutionBackward0, NODES.AddBackward0)
"""The kinds of nodes for which there may be a source."""


def source_of(node: Node, uses: Sequence[Use], targets: Sequence[Target]) -> Source | None:
    """Return the source for a node of `SOURCE_KINDS`; None if only autograd can compute its uses.

    Only autograd can for complex numbers, and for tensors saved through hooks (checkpointed,
    offloaded): the node may unpack those only once.
    """
    kind = type(node)
    if kind is NODES.AddmmBackward0 and uses == _USES_OF_LINEAR:
        linear = _linear_source(node, targets)
        if linear is not None:
            return linear
    matrix_node = _MATRIX_NODES.get(kind)
    if matrix_node is not None:
        return _matrix_source(node, uses, targets, matrix_node)
    if kind is NODES.ConvolutionBackward0:
        return _convolution_source(node, uses, targets)
    return _addition_source(node, uses, targets)


_USES_OF_LINEAR = (Use(0, False), Use(2, True))
_MAT1, _MAT2 = _MATRIX_NODES[NODES.AddmmBackward0][:2]


def _linear_source(node: Any, targets: Sequence[Target]) -> Source | None:
    """Return the source for the uses of a linear layer, if it is a usual one."""
    bias, weight = targets
    if type(bias) is GradientEdge or saved_scales(node) != (1, 1):
        return None
    if _MAT1.packed_by(node) is not None:
        return None
    x = _MAT1.value(node).detach()
    if not is_plain(x) or x.is_complex():
        return None
    is_transposed = not is_column_major(*_MAT2.layout(node))
    return LinearSource(bias, weight, x, is_transposed)  # type: ignore[arg-type]  # no edges


def _matrix_source(
    node: Any, uses: Sequence[Use], targets: Sequence[Target], kind: _MatrixNode
) -> Source | None:
    left: Tensor | None = None
    right: Tensor | None = None
    is_left_transposed = is_right_transposed = False
    left_edge = kind.left_edge
    for edge, transposed in uses:
        if edge == left_edge:
            right = _saved(node, kind.right)
            if right is None:
                return None
            is_left_transposed = kind.is_2d and is_column_major(*kind.left.layout(node))
        elif edge > left_edge:
            left = _saved(node, kind.left)
            if left is None:
                return None
            is_right_transposed = kind.is_2d and is_column_major(*kind.right.layout(node))
        elif transposed:
            return None
    scales = saved_scales(node) if left_edge else (1, 1)
    if type(scales[0]) is complex or type(scales[1]) is complex:
        return None
    is_transposed = is_left_transposed, is_right_transposed
    return MatrixSource(uses, targets, left, right, left_edge, scales, is_transposed)


def _convolution_source(node: Any, uses: Sequence[Use], targets: Sequence[Target]) -> Source | None:
    if any(use.edge == 0 or use.transposed for use in uses):
        return None
    x, weight = _saved(node, _CONVOLVED), _saved(node, _KERNEL)
    if x is None or weight is None or not (is_plain(x) and is_plain(weight)):
        return None
    return ConvolutionSource(uses, targets, x, weight, ConvolutionGeometry(*saved_geometry(node)))


def _addition_source(node: Any, uses: Sequence[Use], targets: Sequence[Target]) -> Source | None:
    """Return a source if more than the sum is deferred: it is not worth it for a sum alone."""
    (result,) = grad_metadata(node)
    if result.dtype.is_complex or type(saved_addend_scale(node)) is complex:
        return None
    for target in targets:
        if not isinstance(target, GradientEdge):
            return None
        if grad_metadata(target.node)[target.output_nr].dtype != result.dtype:
            return None
    return AdditionSource(uses, targets, saved_addend_scale(node))


_CONVOLVED, _KERNEL = SavedTensor("input"), SavedTensor("weight")


def _saved(node: Any, place: SavedTensor) -> Tensor | None:
    """Return a real tensor that the node saved without hooks, detached, or None.

    It is plain, or a DTensor of which ranks hold plain shards.
    """
    if place.packed_by(node) is not None:
        return None
    tensor = place.value(node).detach()
    if not (is_plain(tensor) or (is_sharded(tensor) and has_known_placements(tensor))):
        return None
    return None if tensor.is_complex() else tensor


def _shape(target: Target) -> Sequence[int]:
    if type(target) is not GradientEdge:
        return target.shape  # type: ignore[union-attr]  # it is a tensor
    shape: Sequence[int] = grad_metadata(target.node)[target.output_nr].shape
    return shape

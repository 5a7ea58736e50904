"""Sources: autograd nodes whose weight gradients we compute ourselves, without the node.

A source is made from a node before the engine pass of I, which releases what the node
saved. Given the gradient that arrived at the node, it makes the terms of its weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.backward.settling import Tails, Terms, is_plain
from penstock.backward.sharded_products import has_known_placements, is_sharded, product_of
from penstock.backward.terms import (
    ConvolutionGeometry,
    ConvolutionGrads,
    Part,
    SumTo,
    Term,
    is_column_major,
)
from penstock.torch_private import (
    grad_metadata,
    saved_addend_scale,
    saved_geometry,
    saved_layout,
    saved_scales,
    saved_tensor,
)

Target: TypeAlias = Tensor | GradientEdge
"""The destination of a gradient: a parameter, or an edge in the graph that leads to some."""


class WeightWork(NamedTuple):
    """The work of W."""

    terms: Terms
    tails: Tails

    def add(self, target: Target, term: Term) -> None:
        if isinstance(target, GradientEdge):
            self.tails.append((target, term))
        else:
            self.terms.append((target, term))


class Use(NamedTuple):
    """A use of `target` by edge number `edge` of a node; `transposed` if of its transpose."""

    edge: int
    target: Target
    transposed: bool


class Passage:
    """A source where the gradient that arrives is the target's own."""

    __slots__ = ("_target",)
    saved: Sequence[Tensor] = ()

    def __init__(self, target: Target) -> None:
        self._target = target

    def add_work(self, grad: Tensor, work: WeightWork) -> None:
        work.add(self._target, grad)


class MatrixSource:
    """A node of `alpha * left @ right`, or of `beta * added + alpha * left @ right`.

    `is_transposed` says for the left and the right factor whether autograd computes the transpose
    of its gradient.
    """

    __slots__ = ("_alpha", "_beta", "_is_transposed", "_left", "_left_edge", "_right", "_uses")

    def __init__(
        self,
        uses: Sequence[Use],
        left: Tensor | None,
        right: Tensor | None,
        left_edge: int,
        scales: tuple[float, float],
        is_transposed: tuple[bool, bool],
    ) -> None:
        self._uses = uses
        self._left = left
        self._right = right
        self._left_edge = left_edge
        self._alpha, self._beta = scales
        self._is_transposed = is_transposed

    @property
    def saved(self) -> Sequence[Tensor]:
        return [factor for factor in (self._left, self._right) if factor is not None]

    def add_work(self, grad: Tensor, work: WeightWork) -> None:
        for use in self._uses:
            work.add(use.target, self._term(use, grad))

    def _term(self, use: Use, grad: Tensor) -> Term:
        edge, target, transposed = use
        if edge < self._left_edge:
            return SumTo(grad, _shape(target), self._beta)
        which = int(edge > self._left_edge)
        is_transposed = self._is_transposed[which]
        if which:  # the right factor: left.mT @ grad
            left = self._left
            assert left is not None  # autograd saves what a differentiable factor needs
            first, second = (grad.mT, left) if is_transposed else (left.mT, grad)
        else:  # the left factor: grad @ right.mT
            right = self._right
            assert right is not None
            first, second = (right, grad.mT) if is_transposed else (grad, right.mT)
        return product_of(first, second, self._alpha, is_transposed=is_transposed != transposed)


class ConvolutionSource:
    """A node of a convolution; edge 1 is its weight, edge 2 its bias."""

    __slots__ = ("_geometry", "_uses", "_weight", "_x")

    def __init__(
        self, uses: Sequence[Use], x: Tensor, weight: Tensor, geometry: ConvolutionGeometry
    ) -> None:
        self._uses = uses
        self._x = x
        self._weight = weight
        self._geometry = geometry

    @property
    def saved(self) -> Sequence[Tensor]:
        return (self._x,)

    def add_work(self, grad: Tensor, work: WeightWork) -> None:
        asked = [use.edge for use in self._uses]
        grads = ConvolutionGrads(
            grad, self._x, self._weight, self._geometry, (1 in asked, 2 in asked)
        )
        for use in self._uses:
            work.add(use.target, Part(grads, use.edge - 1))


class AdditionSource:
    """A node of `first + alpha * second`, one of them computed from parameters alone."""

    __slots__ = ("_alpha", "_uses")
    saved: Sequence[Tensor] = ()

    def __init__(self, uses: Sequence[Use], alpha: float) -> None:
        self._uses = uses
        self._alpha = alpha

    def add_work(self, grad: Tensor, work: WeightWork) -> None:
        for use in self._uses:
            scale = self._alpha if use.edge == 1 else 1
            work.add(use.target, SumTo(grad, _shape(use.target), scale))


Source: TypeAlias = Passage | MatrixSource | ConvolutionSource | AdditionSource


@dataclass(frozen=True, slots=True)
class _MatrixNode:
    """The names under which a kind of node saves its factors, and the edge of the left one."""

    left: str
    right: str
    left_edge: int
    is_2d: bool


_MATRIX_NODES = {
    "MmBackward0": _MatrixNode("self", "mat2", 0, True),
    "BmmBackward0": _MatrixNode("self", "mat2", 0, False),
    "AddmmBackward0": _MatrixNode("mat1", "mat2", 1, True),
    "BaddbmmBackward0": _MatrixNode("batch1", "batch2", 1, False),
}


def source_of(node: Node, uses: Sequence[Use]) -> Source | None:
    """Return the source for these uses, or None if only autograd can compute them.

    Only autograd can for unknown kinds of nodes, for complex numbers, and for tensors saved
    through hooks (checkpointed, offloaded): the node may unpack those only once.
    """
    kind = type(node).__name__
    if kind in _MATRIX_NODES:
        return _matrix_source(node, uses, _MATRIX_NODES[kind])
    if kind == "ConvolutionBackward0":
        return _convolution_source(node, uses)
    if kind == "AddBackward0":
        return _addition_source(node, uses)
    return None


def _matrix_source(node: Any, uses: Sequence[Use], kind: _MatrixNode) -> Source | None:
    left: Tensor | None = None
    right: Tensor | None = None
    is_left_transposed = is_right_transposed = False
    for use in uses:
        if use.edge == kind.left_edge:
            right = _saved(node, kind.right)
            if right is None:
                return None
            is_left_transposed = kind.is_2d and _is_column_major(node, kind.left)
        elif use.edge > kind.left_edge:
            left = _saved(node, kind.left)
            if left is None:
                return None
            is_right_transposed = kind.is_2d and _is_column_major(node, kind.right)
        elif use.transposed:
            return None
    scales = saved_scales(node) if kind.left_edge else (1, 1)
    if complex in map(type, scales):
        return None
    is_transposed = is_left_transposed, is_right_transposed
    return MatrixSource(uses, left, right, kind.left_edge, scales, is_transposed)


def _is_column_major(node: Any, factor: str) -> bool:
    return is_column_major(*saved_layout(node, factor))


def _convolution_source(node: Any, uses: Sequence[Use]) -> Source | None:
    if any(use.edge == 0 or use.transposed for use in uses):
        return None
    x, weight = _saved(node, "input"), _saved(node, "weight")
    if x is None or weight is None or not (is_plain(x) and is_plain(weight)):
        return None
    return ConvolutionSource(uses, x, weight, ConvolutionGeometry(*saved_geometry(node)))


def _addition_source(node: Any, uses: Sequence[Use]) -> Source | None:
    """Return a source if more than the sum is deferred: it is not worth it for a sum alone."""
    (result,) = grad_metadata(node)
    if result.dtype.is_complex or type(saved_addend_scale(node)) is complex:
        return None
    for use in uses:
        if not isinstance(use.target, GradientEdge):
            return None
        if grad_metadata(use.target.node)[use.target.output_nr].dtype != result.dtype:
            return None
    return AdditionSource(uses, saved_addend_scale(node))


def _saved(node: Any, name: str) -> Tensor | None:
    """Return a real tensor that the node saved without hooks, detached, or None.

    It is plain, or a DTensor of which ranks hold plain shards.
    """
    if (saved := saved_tensor(node, name)) is None:
        return None
    tensor = saved.detach()
    is_known = is_plain(tensor) or (is_sharded(tensor) and has_known_placements(tensor))
    return tensor if is_known and not tensor.is_complex() else None


def _shape(target: Target) -> Sequence[int]:
    if isinstance(target, GradientEdge):
        shape: Sequence[int] = grad_metadata(target.node)[target.output_nr].shape
        return shape
    return target.shape

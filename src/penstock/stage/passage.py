"""One microbatch's passage through a stage: between its forward and the end of its backward."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.backward import PendingBackward, stage_backward
from penstock.comm.collective_results import values_of
from penstock.errors import StageError
from penstock.torch_private import REGISTER_PYTREE_NODE, pytree

WeightBackward: TypeAlias = Callable[[], None]


class WholePassage:
    """A microbatch between its forward and its backward, in plain autograd."""

    held: Sequence[Tensor] = ()
    """The tensors that the weight backward holds, once the backward has run."""

    def __init__(
        self,
        outputs: Any,
        inputs: list[Tensor],
        dw_builder: Callable[[], WeightBackward] | None = None,
    ) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self._dw_builder = dw_builder

    def backward(
        self, grads: Any, loss: Tensor | None = None
    ) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """Return the gradients of `inputs`, and the function that the weight backward runs.

        `grads` are the gradients of the outputs, or of the loss if there is one.
        """
        roots = self.outputs if loss is None else loss
        input_grads = stage_backward(roots, grads, self.inputs)
        return input_grads, do_nothing if self._dw_builder is None else self._dw_builder()

    def rerunning(self) -> AbstractContextManager[None]:
        """Return a context in which modules of the forward may run again."""
        return nullcontext()

    def backward_of_nothing(self) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """Run `backward` for a microbatch whose loss does not count: all gradients are zeros."""
        self.outputs = pytree.tree_leaves(self.outputs)
        if not _can_be_nothing(self.outputs):
            return (None,) * len(self.inputs), do_nothing
        return self.backward(_zeros(self.outputs))


class LatePassage(WholePassage):
    """A microbatch of a stage whose inputs need no gradients: nobody waits for its backward.

    So the whole of it is left to the weight backward, in plain autograd.
    """

    def backward(
        self, grads: Any, loss: Tensor | None = None
    ) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        def run_all() -> None:
            stage_backward(roots, grads, ())

        roots, self.outputs = self.outputs if loss is None else loss, None
        return (None,) * len(self.inputs), run_all


class SplitPassage:
    """A microbatch between its forward and its input backward, run by the split engine.

    The loss is computed from stand-ins for the last stage's outputs. Its graph, with any
    parameters of the loss, belongs to plain autograd and ends where the engine's graph begins.
    The two are one graph only if the outputs are in an object that torch cannot look into.
    """

    def __init__(self, forward: PendingBackward, *, is_last: bool) -> None:
        self.outputs = forward.outputs
        self.inputs = forward.inputs
        self._forward = forward
        self.held: Sequence[Tensor] = ()
        self._stand_ins: list[Any] = []
        if not is_last:
            return
        leaves, structure = pytree.tree_flatten(self.outputs)
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            self._stand_ins = [
                stand_in_for(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]
            self.outputs = pytree.tree_unflatten(self._stand_ins, structure)
            forward.outputs = leaves  # A list can hold None as a gradient; not all outputs can.

    def backward(
        self, grads: Any, loss: Tensor | None = None
    ) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """Return the gradients of `inputs`, and the function that adds the weight gradients."""
        if loss is None:
            input_grads, pending = self._forward.backward_input(grads)
        elif not self._stand_ins:
            input_grads, pending = self._forward.backward_input(loss=loss * grads)
        else:
            torch.autograd.backward(loss, grads)
            output_grads = list(map(_grad_of, self._stand_ins))
            if all(grad is None for grad in output_grads):
                return (None,) * len(self.inputs), do_nothing
            input_grads, pending = self._forward.backward_input(output_grads)
        self.held = pending.held
        return input_grads, pending.run

    def rerunning(self) -> AbstractContextManager[None]:
        """Return a context in which modules of the forward may run again."""
        return self._forward.rerunning()

    def backward_of_nothing(self) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """Run `backward` for a microbatch whose loss does not count: all gradients are zeros."""
        outputs = self._stand_ins or pytree.tree_leaves(self._forward.outputs)
        self._forward.outputs = pytree.tree_leaves(self._forward.outputs)
        if not _can_be_nothing(outputs):
            return (None,) * len(self.inputs), do_nothing
        return self.backward(_zeros(outputs))


Passage: TypeAlias = WholePassage | LatePassage | SplitPassage


def do_nothing() -> None:
    """Do nothing: the weight backward of a stage whose backward ran in one piece."""


def needs_grad(leaf: Any) -> bool:
    """Return whether `leaf` is a tensor that needs a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def stand_in_for(tensor: Tensor) -> Tensor:
    """Return a leaf with the same values, at which a graph ends."""
    return values_of(tensor).requires_grad_(tensor.requires_grad)


def _can_be_nothing(outputs: Sequence[Any]) -> bool:
    """Return whether an output needs a gradient; raise an error if torch cannot tell."""
    if not any(isinstance(leaf, Tensor) for leaf in outputs):
        raise StageError(
            "a microbatch has weight 0, and the last stage returns an object that torch cannot "
            "look into, so Penstock cannot tell which gradients are zero. Return tensors, "
            f"tuples or dicts, or register its class with {REGISTER_PYTREE_NODE}."
        )
    return any(map(needs_grad, outputs))


def _zeros(outputs: Sequence[Any]) -> list[Tensor | None]:
    """Return a gradient of zeros for each output that needs one, and None for the others."""
    return [torch.zeros_like(leaf) if needs_grad(leaf) else None for leaf in outputs]


def _grad_of(stand_in: Any) -> Tensor | None:
    """Return the gradient of a stand-in, and remove it there so that it is not kept alive."""
    if not isinstance(stand_in, Tensor):
        return None
    grad, stand_in.grad = stand_in.grad, None
    return grad

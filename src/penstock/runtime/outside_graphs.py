"""Arguments that need a gradient of their own: the caller's graph before the pipeline."""

from typing import Any

import torch
from torch import Tensor

from penstock.runtime.messages.forms import flatten
from penstock.stage.passage import needs_grad, stand_in_for
from penstock.torch_private import pytree


class OutsideGraphs:
    """Gradients of the caller's tensors, collected for one backward through the caller's graphs.

    Stages work with stand-ins for these tensors. If several microbatches or stages use one tensor,
    its gradients are added as they come, in the order in which autograd would add them.
    """

    def __init__(self) -> None:
        self._grads: dict[tuple[int, torch.layout], tuple[Tensor, Tensor]] = {}
        """The caller's tensors with their gradients, by the id of the tensor.

        Sparse gradients are kept apart from dense ones, to which torch adds them in one order only.
        """

    def cut_off(self, value: Any) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
        """Return the value with stand-ins for tensors that need gradients, and pairs of both."""
        leaves, structure = (
            flatten(value) if isinstance(value, tuple) else pytree.tree_flatten(value)
        )
        if not any(map(needs_grad, leaves)):
            return value, []
        pairs = []
        for number, leaf in enumerate(leaves):
            if needs_grad(leaf):
                leaves[number] = stand_in_for(leaf)
                pairs.append((leaf, leaves[number]))
        return pytree.tree_unflatten(leaves, structure), pairs

    def add(self, tensor: Tensor, grad: Tensor) -> None:
        """Add the gradient that a microbatch gave to one of the caller's tensors."""
        place = id(tensor), grad.layout
        known = self._grads.get(place)
        # Not in place: others may use the first gradient too.
        self._grads[place] = tensor, grad if known is None else known[1] + grad

    def backward(self) -> None:
        """Hand all gradients to the caller's graphs."""
        if self._grads:
            tensors, grads = zip(*self._grads.values(), strict=True)
            torch.autograd.backward(tensors, grads)

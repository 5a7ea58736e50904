"""Arguments that need a gradient of their own: the caller's graph before the pipeline."""

from typing import Any

import torch
from torch import Tensor

from penstock.runtime.messages.forms import flatten
from penstock.stage.passage import needs_grad, stand_in_for
from penstock.torch_private import pytree


class OutsideGraphs:
    """Gradients of the caller's tensors, collected for one backward through the caller's graphs.

    Stages work with stand-ins for these tensors.
    """

    def __init__(self) -> None:
        self._grads: list[tuple[Tensor, Tensor]] = []

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
        self._grads.append((tensor, grad))

    def backward(self) -> None:
        """Hand all gradients to the caller's graphs."""
        if self._grads:
            tensors, grads = zip(*self._grads, strict=True)
            torch.autograd.backward(tensors, grads)

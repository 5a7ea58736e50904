"""Unread tensors: in host memory, for those on the meta device while a model is traced.

A model may compute differently on different devices: experts in transformers count floats on CPUs
and integers elsewhere. Traced on the meta device, it would be a model for no device that runs it.
Tracing reads no values, so the memory of an unread tensor is never touched, and takes no room.
"""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.torch_private import own_buffers, own_parameters, pytree


class UnreadTensors:
    """A context in which a model's tensors on the meta device are on the CPU, like its inputs.

    If the inputs are elsewhere, nothing is changed.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = model
        self._are_needed = are_on_host((args, kwargs))
        self._originals: dict[Tensor, Tensor] = {}

    def __enter__(self) -> "UnreadTensors":
        if self._are_needed:
            tensors = (*self._model.parameters(), *self._model.buffers())
            made = {tensor: _unread(tensor) for tensor in tensors if tensor.is_meta}
            self._originals = {unread: tensor for tensor, unread in made.items()}
            _replace(self._model, made)
        return self

    def __exit__(self, *error: object) -> None:
        self.put_back(self._model)

    def put_back(self, module: nn.Module) -> None:
        """Replace the unread tensors in a module by the model's own tensors."""
        _replace(module, self._originals)


def are_on_host(inputs: Any) -> bool:
    """Return whether all tensors of a model's inputs are on the CPU."""
    leaves = pytree.tree_leaves(inputs)
    return {"cpu"} == {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}


def _unread(tensor: Tensor) -> Tensor:
    own = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(own, tensor.requires_grad)
    return own


def _replace(module: nn.Module, new: dict[Tensor, Tensor]) -> None:
    for owner in module.modules():
        kinds: tuple[dict[str, Any], ...] = (own_parameters(owner), own_buffers(owner))
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is not None and tensor in new:
                    tensors[name] = new[tensor]

"""Tensors without values, in place of those of a model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.cutting.shape_counts import fake_like
from penstock.torch_private import own_buffers, own_parameters, pytree

CPU = torch.device("cpu")


@contextmanager
def without_values(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules parameters and buffers without values; put their own back at the end.

    It must be used inside FakeTensorMode. What several modules share, they share without values.
    """
    replaced: dict[Tensor, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        parts = dict.fromkeys(part for module in modules for part in module.modules())
        for own in (held for part in parts for held in _own_tensors(part)):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if tensor not in replaced:
                    replaced[tensor] = _valueless(tensor)
                before.append((own, name, tensor))
                own[name] = replaced[tensor]
        yield
    finally:
        for own, name, tensor in before:
            own[name] = tensor


def _own_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return own_parameters(module), own_buffers(module)


def valueless_tree(values: Any) -> Any:
    """Return a nested value with tensors without values, inside FakeTensorMode."""
    return pytree.tree_map_only(Tensor, _valueless, values)


def _valueless(tensor: Tensor) -> Tensor:
    fake = fake_like(tensor, device=CPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)

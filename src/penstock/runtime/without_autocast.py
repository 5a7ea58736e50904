"""Backwards in the dtypes that their forwards chose."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from penstock.torch_private import is_any_autocast_enabled

_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


def without_autocast() -> AbstractContextManager[Any]:
    """Return a context without autocast: a backward runs in the dtypes its forward chose."""
    if not is_any_autocast_enabled():
        return _AS_IT_IS
    context = ExitStack()
    for device_type in _device_types():
        if torch.is_autocast_enabled(device_type):
            context.enter_context(torch.autocast(device_type, enabled=False))
    return context


def _device_types() -> set[str]:
    """Return the types of devices that autocast may be enabled for."""
    accelerator = torch.accelerator.current_accelerator()
    return {"cpu", "cuda"} if accelerator is None else {"cpu", "cuda", accelerator.type}

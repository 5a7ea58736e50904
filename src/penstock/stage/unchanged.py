"""Run a module and leave it as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from penstock.torch_private import own_buffers


@contextmanager
def kept_as_it_was(module: nn.Module) -> Iterator[None]:
    """Restore what running a module changes: its buffers, and the random state."""
    before = [(owner, dict(own_buffers(owner))) for owner in module.modules()]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for owner, buffers in before:  # Some may have been registered, removed or replaced.
            own_buffers(owner).clear()
            own_buffers(owner).update(buffers)
        for buffer, value in values:
            buffer.copy_(value)

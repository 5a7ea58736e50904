"""Refuse models whose backward is not that of their operations.

A trace has the operations of the forward, and their derivatives. Other things that a model does to
gradients would be lost silently: autograd Functions, hooks, reentrant checkpoints.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from penstock.errors import TraceError
from penstock.torch_private import CheckpointFunction, backward_hooks, calling_at_checkpoints

# The replacements of torch's own functions below apply to all threads; so do the hooks of torch's
# counters.
ONE_AT_A_TIME = threading.RLock()
_REMEDY = (
    "A trace has only the operations of the forward, so this would be lost. Leave it out, or "
    "cut the model between its modules with penstock.cut_between_modules()."
)


@contextmanager
def refusing_own_backwards(model: nn.Module) -> Iterator[None]:
    """Raise an error if the model, while it is traced, does something to gradients itself."""
    with ONE_AT_A_TIME:
        yield from _refusing(model)


def _refusing(model: nn.Module) -> Iterator[None]:
    kind = type(model).__name__  # The functions below must not keep the model.
    for name, module in model.named_modules():
        if any(backward_hooks(module)):
            raise _refusal(kind, f"its module {name!r} has a backward hook")
    original, register_hook = vars(Function)["apply"], torch.Tensor.register_hook
    tracer = threading.get_ident()  # Other threads must work as usual meanwhile.

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == tracer:
            if cls is CheckpointFunction:
                raise _refusal(kind, "it uses checkpointing with use_reentrant=True")
            if not cls.__module__.startswith("torch."):
                raise _refusal(kind, f"it calls the autograd Function {cls.__name__}")
        return original.__get__(None, cls)(*args, **kwargs)

    def refuse_hook(tensor: torch.Tensor, hook: Any) -> Any:
        if threading.get_ident() == tracer:
            raise _refusal(kind, "its forward registers a hook on a tensor")
        return register_hook(tensor, hook)  # type: ignore[no-untyped-call]  # torch has no types

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]  # put back below
    torch.Tensor.register_hook = refuse_hook  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]  # as it was
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]  # as it was


@contextmanager
def noticing_functions(is_inside: list[bool]) -> Iterator[None]:
    """Keep a list non-empty while the forward of an autograd Function runs in this thread.

    Modules that such a forward calls have no gradients of their own: the Function computes them.
    """
    with ONE_AT_A_TIME:
        original, caller = vars(Function)["apply"], threading.get_ident()

        def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            own = original.__get__(None, cls)
            if threading.get_ident() != caller:
                return own(*args, **kwargs)
            is_inside.append(True)
            try:
                return own(*args, **kwargs)
            finally:
                is_inside.pop()

        Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]  # see below
        try:
            yield
        finally:
            Function.apply = original  # type: ignore[method-assign]  # as it was


@contextmanager
def noticing_checkpoints(model: nn.Module) -> Iterator[None]:
    """Warn at the end of the context if the model checkpointed a part of its forward."""
    with ONE_AT_A_TIME:
        yield from _noticing(model)


def _noticing(model: nn.Module) -> Iterator[None]:
    found: list[bool] = []
    with calling_at_checkpoints(lambda: found.append(True)):
        yield
    if found:
        warnings.warn(
            f"{type(model).__name__} checkpoints activations, but a trace does not keep that: its "
            "stages compute the same, but hold all activations. To keep it, cut the model between "
            "its modules with penstock.cut_between_modules(), or checkpoint the stages' modules.",
            stacklevel=5,
        )


def _refusal(kind: str, what: str) -> TraceError:
    return TraceError(f"{kind} cannot be traced: {what}. {_REMEDY}")

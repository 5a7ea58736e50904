"""`penstock.compile`: torch.compile, with a backward that comes in two halves."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import CompileError

if TYPE_CHECKING:
    from penstock.compiling.split_backend import SplitBackend


def make_backend(
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    memory_budget: float | None = None,
) -> "SplitBackend":
    """Return the backend for these options; raise an error for options that rule out a split."""
    if mode is not None and options is not None:
        raise CompileError(
            f"mode={mode!r} and options were both given. Expected one of them, as in "
            "torch.compile. Put what the mode sets into options, or leave one out."
        )
    is_share = isinstance(memory_budget, int | float) and 0 <= memory_budget <= 1
    if memory_budget is not None and not is_share:
        raise CompileError(
            f"memory_budget is {memory_budget!r}. Expected a share between 0, to compute all that "
            "can be computed again in the backward, and 1, to keep what is fastest. Leave it out "
            "for torch's default."
        )
    # These load torch's compiler, which takes seconds.
    from penstock.compiling.split_backend import SplitBackend
    from penstock.torch_private.compiler import inductor_options

    found = inductor_options(mode, options, dynamic)
    if found.get("triton.cudagraphs"):
        given = f"mode={mode!r}" if mode is not None else "the option 'triton.cudagraphs'"
        raise CompileError(
            f"{given} records CUDA graphs, in which the next microbatch would overwrite what the "
            "weight backward still needs. Leave it out, or use "
            "mode='max-autotune-no-cudagraphs'."
        )
    found["triton.cudagraphs"] = False  # Also where torch's own configuration has it.
    return SplitBackend(tuple(sorted(found.items())), memory_budget)


def compile(
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    memory_budget: float | None = None,
    **others: Any,
) -> Any:
    """Compile a module or a function as torch.compile does; its backward can be split.

    All options of torch.compile are taken, except `backend`, which is inductor, and modes that
    record CUDA graphs. In a schedule with split backwards, a compiled region runs its input half
    in I and leaves matrix products and convolutions of its weights to W. Elsewhere its backward
    runs whole, as with torch.compile.

    `memory_budget` is the share of activations that forwards may keep, from 0 to 1; the backward
    computes the others again.

        >>> import torch, penstock
        >>> block = penstock.compile(torch.nn.Linear(4, 4))
    """
    if "backend" in others:
        raise CompileError(
            f"backend={others['backend']!r} was given, but only the code that inductor makes can "
            "be split. Leave it out, or use torch.compile: what it compiles runs whole, in the "
            "input backward."
        )
    backend = make_backend(mode=mode, options=options, dynamic=dynamic, memory_budget=memory_budget)
    return torch.compile(model, backend=backend, dynamic=dynamic, **others)

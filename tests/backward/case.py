"""What a model case is, and the pieces that cases are written with."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Case:
    """A stage whose split backward must equal plain autograd.

    `build` and `make_inputs` draw from torch's generator, so that the same seed gives the
    same stage and the same microbatch again. `forward_context` is in force in forwards.
    `unused` numbers the output tensors, in order, to which nobody sends a gradient.
    """

    name: str
    build: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[Any, ...]]
    make_kwargs: Callable[[], dict[str, Any]] = dict
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    unused: frozenset[int] = frozenset()


class Raw(nn.Module):
    """A stage written as one function of itself and its inputs, on parameters of its own.

    `tally` counts what the function wants counted.
    """

    def __init__(self, function: Callable[..., Any], **params: Tensor) -> None:
        super().__init__()
        self.function = function
        self.tally: Counter[str] = Counter()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def raw(function: Callable[..., Any], **shapes: tuple[int, ...]) -> Callable[[], Raw]:
    """Builds a `Raw` whose parameters are random, of the given shapes, in the given order."""
    return lambda: Raw(
        function, **{name: torch.randn(shape) * 0.5 for name, shape in shapes.items()}
    )


def wrapped(make: Callable[[], Any], function: Callable[..., Any]) -> Callable[[], Raw]:
    """Builds a `Raw` around the modules of `make`: `function(*modules, *args)`.

    `make` returns one module or a list of them.
    """

    def build() -> Raw:
        made = make()
        modules = nn.ModuleList(made if isinstance(made, list) else [made])
        stage = Raw(lambda self, *args, **kwargs: function(*self.parts, *args, **kwargs))
        stage.parts = modules
        return stage

    return build


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A microbatch's activation: a leaf that requires a gradient."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def given(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Inputs that all require gradients, of these shapes."""
    return lambda: tuple(floats(*shape) for shape in shapes)


def frozen(build: Callable[[], nn.Module], *endings: str) -> Callable[[], nn.Module]:
    """The same stage, with the parameters whose names end so frozen."""

    def build_frozen() -> nn.Module:
        stage = build()
        for name, param in stage.named_parameters():
            if name.endswith(endings):
                param.requires_grad_(False)
        return stage

    return build_frozen


def tally_of(stage: nn.Module) -> Counter[str]:
    """All that the modules of a stage have counted."""
    total: Counter[str] = Counter()
    for module in stage.modules():
        total += getattr(module, "tally", Counter())
    return total

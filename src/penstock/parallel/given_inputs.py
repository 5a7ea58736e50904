"""The inputs of a model, as its stages take them."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import StageError


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """The way from a model's arguments to those of a step.

    Most cuts give them to the first stage. `names` is for a cut whose stages all take the model's
    inputs, as keyword arguments: it has the names of the model's parameters, in order.
    """

    names: tuple[str, ...] | None = None

    @classmethod
    def by_name(cls, model: nn.Module) -> "GivenInputs":
        """Return the way for a cut whose stages all take the model's inputs."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = inspect.signature(model.forward).parameters.values()
        return cls(tuple(parameter.name for parameter in found if parameter.kind in kinds))

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keyword arguments for a step."""
        if self.names is None:
            return args, kwargs
        if len(args) > len(self.names):
            raise StageError(
                f"{len(args)} arguments were given, but the model takes {len(self.names)} by "
                f"position: {', '.join(self.names)}. Give the others by keyword."
            )
        named = dict(zip(self.names, args, strict=False))
        if twice := named.keys() & kwargs.keys():
            raise StageError(
                f"{sorted(twice)[0]!r} was given by position and by keyword. Give it once."
            )
        return (), {**named, **kwargs}

"""Outputs of a stage as arguments of the next stage and of later ones."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from penstock.ir import StageId


def as_arguments(outputs: Any) -> tuple[Any, ...]:
    """Return the arguments of the next stage: a tuple or list is spread over several."""
    return tuple(outputs) if type(outputs) in (tuple, list) else (outputs,)


def shares_of(
    arguments: tuple[Any, ...], skips_out: Mapping[StageId, int]
) -> list[tuple[Any, ...]]:
    """Return the arguments for the next stage, then those for each skip, which come last."""
    rest = iter(arguments)
    counts = [len(arguments) - sum(skips_out.values()), *skips_out.values()]
    return [tuple(islice(rest, count)) for count in counts]


def as_outputs(arguments: tuple[Any, ...], like: Any) -> Any:
    """Undo `as_arguments`: return values for the next stage's arguments, nested as in `like`."""
    return arguments if type(like) in (tuple, list) else arguments[0]

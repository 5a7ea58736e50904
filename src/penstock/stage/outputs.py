"""Outputs of a stage as arguments of the next, and of stages further on."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from penstock.ir import StageId


def as_arguments(outputs: Any) -> tuple[Any, ...]:
    """What the next stage is called with: a tuple or list is spread over its arguments."""
    return tuple(outputs) if type(outputs) in (tuple, list) else (outputs,)


def shares_of(
    arguments: tuple[Any, ...], skips_out: Mapping[StageId, int]
) -> list[tuple[Any, ...]]:
    """What goes to the next stage, and the last arguments, as many as each skip takes."""
    rest = iter(arguments)
    counts = [len(arguments) - sum(skips_out.values()), *skips_out.values()]
    return [tuple(islice(rest, count)) for count in counts]


def as_outputs(arguments: tuple[Any, ...], like: Any) -> Any:
    """The other way: what mirrors the next stage's arguments, as it mirrors the outputs."""
    return arguments if type(like) in (tuple, list) else arguments[0]

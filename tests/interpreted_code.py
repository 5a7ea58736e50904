"""A backend like that of `penstock.compile`, quick enough for tests: graphs are not compiled.

Everything but inductor's code is the same: regions, cuts, halves and what they keep. Code that
interprets a graph repeats its operations exactly, so that results are equal to the last bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from penstock.compiling.split_backend import SplitBackend


def interpret(module: fx.GraphModule, inputs: Sequence[Any], **details: Any) -> Callable[..., Any]:
    """Return code that runs the graph's operations one by one."""

    def code(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return module(*given)

    code._boxed_call = True  # type: ignore[attr-defined]  # torch gives the arguments in a list
    return code


INTERPRETED = SplitBackend(make_code=interpret)

"""Parameter groups: what an input backward leaves for the weight backward to do."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from penstock.backward.sources import Source, Terms
from penstock.errors import BackwardError

Gradients: TypeAlias = Sequence[Tensor | None]


class ParamGroup:
    """Parameters that get their gradients together, from the nodes that use them.

    `group["params"]` lists the parameters. `group["grads"]` holds, for each node, a tuple
    of the gradients that arrived there; it may be overwritten before the weight backward.
    Several gradients in one tuple are summed; None stands for zero.
    """

    __slots__ = ("_arrived", "_grads", "_is_done", "_params", "_sources")

    def __init__(
        self, params: list[Tensor], sources: Sequence[Source], grads: list[Gradients]
    ) -> None:
        self._params = params
        self._sources = sources
        self._grads = grads
        self._arrived = grads
        self._is_done = False

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(p.shape)) for p in self._params)
        return f"ParamGroup(params of shapes {shapes}; {'done' if self._is_done else 'pending'})"

    def keys(self) -> tuple[str, ...]:
        return ("params", "grads")

    def __getitem__(self, key: str) -> Any:
        if key == "grads":
            return self._grads
        if key == "params":
            return self._params
        raise KeyError(key)

    def __setitem__(self, key: str, grads: list[Gradients]) -> None:
        if key != "grads":
            raise KeyError(key)
        self._grads = grads

    @property
    def params(self) -> Sequence[Tensor]:
        return self._params

    def check(self) -> None:
        """Raise unless the weight backward can take this group."""
        if self._is_done:
            raise BackwardError(
                f"the weight backward of {self!r} has run already, and what it needed is freed. "
                "Run it once for each input backward, or pass retain_graph=True to run it again."
            )
        if len(self._grads) != len(self._sources):
            raise BackwardError(
                f'group["grads"] of {self!r} has {len(self._grads)} entries; expected '
                f"{len(self._sources)}, one tuple of gradients for each node that uses the "
                "parameters."
            )
        if self._grads is self._arrived:
            return
        for position, (given, arrived) in enumerate(zip(self._grads, self._arrived, strict=True)):
            shape = next((grad.shape for grad in arrived if grad is not None), None)
            for grad in given:
                if grad is not None and shape is not None and grad.shape != shape:
                    raise BackwardError(
                        f'group["grads"][{position}] of {self!r} holds a gradient of shape '
                        f"{tuple(grad.shape)}; expected {tuple(shape)}, the shape of the "
                        "gradient that arrived there."
                    )

    def terms(self) -> Terms:
        """The terms of the parameters, from the gradients now in the group."""
        terms: Terms = []
        for source, given in zip(self._sources, self._grads, strict=True):
            arrived = [grad for grad in given if grad is not None]
            if arrived:
                terms += source.terms(arrived[0] if len(arrived) == 1 else _sum(arrived))
        return terms

    def release(self) -> None:
        """Drop all that the weight backward needed."""
        self._is_done = True
        self._sources = ()
        self._grads = self._arrived = []


def _sum(grads: Sequence[Tensor]) -> Tensor:
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return total

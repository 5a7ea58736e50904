"""Parameter groups: what an input backward leaves for the weight backward to do."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

from torch import Tensor

from penstock.backward.sources import Source, Terms
from penstock.backward.structure import describe
from penstock.backward.terms import modified
from penstock.errors import BackwardError

Gradients: TypeAlias = Sequence[Tensor | None]


class ParamGroup:
    """Parameters that get their gradients together, from the nodes that use them.

    `group["params"]` lists the parameters. `group["grads"]` holds, for each node, a tuple
    of the gradients that arrived there; it may be overwritten before the weight backward.
    Several gradients in one tuple are summed; None stands for zero.
    """

    __slots__ = ("_arrived", "_grads", "_params", "_sources", "_version")

    def __init__(
        self, params: Mapping[int, Tensor], sources: Sequence[Source], grads: list[Gradients]
    ) -> None:
        self._params = params
        self._sources: Sequence[Source] | None = sources
        self._arrived = grads
        self._grads = grads
        self._version = _version(grads)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(param.shape)) for param in self._params.values())
        state = "done" if self._sources is None else "pending"
        return f"ParamGroup(params of shapes {shapes}; {state})"

    def keys(self) -> tuple[str, ...]:
        return ("params", "grads")

    def __getitem__(self, key: str) -> Any:
        if key == "grads":
            return self._grads
        if key == "params":
            return list(self._params.values())
        raise KeyError(key)

    def __setitem__(self, key: str, grads: list[Gradients]) -> None:
        if key != "grads":
            raise KeyError(key)
        self._grads = grads

    def check(self, known: Set[int]) -> None:
        """Raise unless the weight backward can run; `known`: the ids of the weights it has."""
        if self._sources is None:
            raise BackwardError(
                f"the weight backward of {self!r} has run already, and what it needed is freed. "
                "Run it once for each input backward, or pass retain_graph=True to run it again."
            )
        if not self._params.keys() <= known:
            strange = next(param for i, param in self._params.items() if i not in known)
            raise BackwardError(
                f"param_groups holds a parameter {describe(strange)} that is not among the "
                "weights. Expected the weights that were given to stage_backward_input: "
                "pass the same module's parameters to both."
            )
        if self._grads is not self._arrived:
            self._check_overwritten(len(self._sources))
        elif _version(self._grads) != self._version:
            tensors = [grad for given in self._grads for grad in given if grad is not None]
            raise modified("input backward", "weight backward", *tensors)

    def _check_overwritten(self, num_nodes: int) -> None:
        if len(self._grads) != num_nodes:
            raise BackwardError(
                f'group["grads"] of {self!r} has {len(self._grads)} entries; expected '
                f"{num_nodes}, one tuple of gradients for each node that uses the parameters."
            )
        for position, (given, arrived) in enumerate(zip(self._grads, self._arrived, strict=True)):
            shape = next((grad.shape for grad in arrived if grad is not None), None)
            for grad in given:
                if grad is not None and shape is not None and grad.shape != shape:
                    raise BackwardError(
                        f'group["grads"][{position}] of {self!r} holds a gradient of shape '
                        f"{tuple(grad.shape)}; expected {tuple(shape)}, the shape of the "
                        "gradient that arrived there."
                    )

    def add_terms(self, terms: Terms) -> None:
        """Add the terms of the parameters, from the gradients now in the group."""
        assert self._sources is not None  # `check` saw to it
        for source, given in zip(self._sources, self._grads, strict=True):
            grad = given[0] if len(given) == 1 else _sum(given)
            if grad is not None:
                source.add_terms(grad, terms)

    def release(self) -> None:
        """Drop all that the weight backward needed."""
        self._sources = None
        self._grads = self._arrived = []


def _version(grads: list[Gradients]) -> int:
    """Changes when any of the gradients is modified in place."""
    return sum(grad._version for given in grads for grad in given if grad is not None)


def _sum(grads: Gradients) -> Tensor | None:
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            total = grad if total is None else total + grad
    return total

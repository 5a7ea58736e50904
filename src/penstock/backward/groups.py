"""Parameter groups: the work that an input backward leaves for the weight backward."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from penstock.backward.sources import Source, WeightWork
from penstock.backward.structure import describe
from penstock.backward.terms import NOTHING_NEEDED, Unmodified
from penstock.errors import BackwardError

Gradients: TypeAlias = Sequence[Tensor | None]


class ParamGroup(Mapping[str, Any]):
    """Parameters that get their gradients together, from the nodes that use them.

    `group["params"]` lists the parameters. `group["grads"]` is a list with one tuple for each
    node: the gradients that arrived there. It may be overwritten, in whole or in part, before
    the weight backward. Several gradients in one tuple are summed; None stands for zero.
    """

    __slots__ = ("_arrived", "_grads", "_params", "_sources", "unmodified")

    def __init__(
        self, params: Sequence[Tensor], sources: Sequence[Source], arrived: Sequence[Gradients]
    ) -> None:
        self._params = params
        self._sources: Sequence[Source] | None = sources
        self._arrived = arrived
        self._grads: list[Gradients] | None = None  # Unless someone has asked for them.
        needed: list[Tensor] = []
        for given in arrived:
            for grad in given:
                if grad is not None:
                    needed.append(grad)
        for source in sources:
            needed += source.saved
        self.unmodified = Unmodified(needed)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(param.shape)) for param in self._params)
        state = "done" if self._sources is None else "pending"
        return f"ParamGroup(params of shapes {shapes}; {state})"

    def __iter__(self) -> Iterator[str]:
        return iter(("params", "grads"))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: str) -> Any:
        if key == "grads":
            if self._grads is None:
                self._grads = list(self._arrived)
            return self._grads
        if key == "params":
            return list(self._params)
        raise KeyError(f"{key!r}: a ParamGroup has 'params' and 'grads' only")

    def __setitem__(self, key: str, grads: list[Gradients]) -> None:
        if key != "grads":
            raise KeyError(f"{key!r}: only 'grads' of a ParamGroup can be set")
        self._grads = grads

    def check(self, known: set[int]) -> None:
        """Raise an error unless the weight backward can run; `known` has the ids of its weights."""
        if self._sources is None:
            raise BackwardError(
                f"the weight backward of {self!r} has run already, and what it needed is freed. "
                "Run it once for each input backward, or pass retain_graph=True to run it again."
            )
        if not known.issuperset(map(id, self._params)):
            strange = next(param for param in self._params if id(param) not in known)
            raise BackwardError(
                f"param_groups holds a parameter {describe(strange)} that is not among the "
                "weights. Expected the weights that were given to stage_backward_input: "
                "pass the same module's parameters to both."
            )
        self.unmodified.check()
        if self._grads is not None:
            self._check_overwritten(self._grads)

    def _check_overwritten(self, grads: list[Gradients]) -> None:
        if len(grads) != len(self._arrived):
            raise BackwardError(
                f'group["grads"] of {self!r} has {len(grads)} entries; expected '
                f"{len(self._arrived)}, one tuple of gradients for each node that uses the "
                "parameters. Assign a list as long as the one you read."
            )
        for position, (given, arrived) in enumerate(zip(grads, self._arrived, strict=True)):
            if given is arrived:
                continue
            shape = next((grad.shape for grad in arrived if grad is not None), None)
            for grad in _entries(given, f'group["grads"][{position}] of {self!r}'):
                if grad is not None and shape is not None and grad.shape != shape:
                    raise BackwardError(
                        f'group["grads"][{position}] of {self!r} holds a gradient of shape '
                        f"{tuple(grad.shape)}; expected {tuple(shape)}, the shape of the "
                        "gradient that arrived there. Assign gradients of that shape."
                    )

    def add_work(self, work: WeightWork) -> None:
        """Add the work for the gradients now in the group."""
        assert self._sources is not None  # `check` makes sure of it.
        grads = self._arrived if self._grads is None else self._grads
        for source, given in zip(self._sources, grads, strict=True):
            grad = given[0] if len(given) == 1 else _sum(given)
            if grad is not None:
                source.add_work(grad, work)

    def release(self) -> None:
        """Drop everything that the weight backward needed."""
        self._sources = None
        self._grads = None
        self._arrived = ()
        self.unmodified = NOTHING_NEEDED


def _entries(given: Any, name: str) -> Gradients:
    if not isinstance(given, tuple | list):
        raise BackwardError(
            f"{name} is a {type(given).__name__}; expected a tuple of tensors or None. "
            "Put a single gradient into a tuple: (grad,)."
        )
    return given


def _sum(grads: Gradients) -> Tensor | None:
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            total = grad if total is None else total + grad
    return total

"""Parameter groups: the work that an input backward leaves for the weight backward."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

from torch import Tensor

from penstock.backward.sources import Source, WeightWork
from penstock.backward.structure import describe
from penstock.backward.terms import Unmodified
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
        self, params: Mapping[int, Tensor], sources: Sequence[Source], arrived: Sequence[Gradients]
    ) -> None:
        self._params = params
        self._sources: Sequence[Source] | None = sources
        self._arrived = arrived
        self._grads = list(arrived)
        needed = [grad for given in arrived for grad in given if grad is not None]
        for source in sources:
            needed += source.saved
        self.unmodified = Unmodified(needed)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(param.shape)) for param in self._params.values())
        state = "done" if self._sources is None else "pending"
        return f"ParamGroup(params of shapes {shapes}; {state})"

    def __iter__(self) -> Iterator[str]:
        return iter(("params", "grads"))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: str) -> Any:
        if key == "grads":
            return self._grads
        if key == "params":
            return list(self._params.values())
        raise KeyError(f"{key!r}: a ParamGroup has 'params' and 'grads' only")

    def __setitem__(self, key: str, grads: list[Gradients]) -> None:
        if key != "grads":
            raise KeyError(f"{key!r}: only 'grads' of a ParamGroup can be set")
        self._grads = grads

    def check(self, known: Set[int]) -> None:
        """Raise an error unless the weight backward can run; `known` has the ids of its weights."""
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
        self.unmodified.check()
        self._check_overwritten()

    def _check_overwritten(self) -> None:
        if len(self._grads) != len(self._arrived):
            raise BackwardError(
                f'group["grads"] of {self!r} has {len(self._grads)} entries; expected '
                f"{len(self._arrived)}, one tuple of gradients for each node that uses the "
                "parameters. Assign a list as long as the one you read."
            )
        for position, (given, arrived) in enumerate(zip(self._grads, self._arrived, strict=True)):
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
        for source, given in zip(self._sources, self._grads, strict=True):
            grad = given[0] if len(given) == 1 else _sum(given)
            if grad is not None:
                source.add_work(grad, work)

    def release(self) -> None:
        """Drop everything that the weight backward needed."""
        self._sources = None
        self._arrived = self._grads = []
        self.unmodified = Unmodified(())


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

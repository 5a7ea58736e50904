"""Compiled regions that ran in an engine's forward, and what their input halves leave for W.

`penstock.compile` compiles a region's backward in two halves. A region does not know the engine
that runs it, so the engine notes the calls of its forward here, for the thread that runs it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import NamedTuple

from torch import Tensor

from penstock.backward.terms import Part, Term, Unmodified

WeightHalf = Callable[[list[object]], Sequence[Tensor]]
"""Compiled code that returns weight gradients; it empties the list that it is given."""


class CompiledGrads:
    """The weight gradients of one call of a compiled region, which come from one graph."""

    __slots__ = ("_call", "_found")

    def __init__(self, call: "WaitingCall") -> None:
        self._call: WaitingCall | None = call
        self._found: list[Tensor | None] = []

    def take(self, which: int) -> Tensor:
        """Return a gradient, and stop holding it."""
        if self._call is not None:
            self._found = [grad for _, grad in self._call.compute()]
            self._call = None
        taken, self._found[which] = self._found[which], None
        assert taken is not None  # it is taken once
        return taken


class WaitingCall(NamedTuple):
    """The weight half of one call: `run` on `kept` returns the gradients of `params`."""

    sequence_number: int
    """The place of the call among the nodes of the graph."""
    run: WeightHalf
    kept: list[object]
    unmodified: Unmodified
    """The tensors among the kept values; some may be parameters, which hooks may change."""
    params: Sequence[Tensor]

    def compute(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters with their gradients, which nobody else holds."""
        self.unmodified.check()
        self.unmodified.tensors.clear()
        return list(zip(self.params, self.run(self.kept), strict=True))

    def add_terms(self, terms: list[tuple[Tensor, Term]]) -> None:
        """Add terms that run the weight half when the first of them is needed."""
        grads = CompiledGrads(self)
        terms += [(param, Part(grads, which)) for which, param in enumerate(self.params)]


class CompiledCalls:
    """The calls of compiled regions in one forward; `is_splitting` while its input half runs."""

    __slots__ = ("_waiting", "_weights", "is_any_noted", "is_splitting", "needs_parameters")

    def __init__(self) -> None:
        self.is_any_noted = False
        self.is_splitting = False
        self.needs_parameters = False
        self._waiting: list[WaitingCall] = []
        self._weights: set[int] = set()

    def may_wait(self, params: Iterable[Tensor]) -> bool:
        """Return whether these are weights, not parameters that the module was called with."""
        return self._weights.issuperset(map(id, params))

    def leave(
        self,
        sequence_number: int,
        run: WeightHalf,
        kept: list[object],
        params: Sequence[Tensor],
    ) -> None:
        """Leave the weight half of a call: `run` on `kept` returns the gradients of `params`."""
        tensors = Unmodified([value for value in kept if isinstance(value, Tensor)])
        self._waiting.append(WaitingCall(sequence_number, run, kept, tensors, params))

    @contextmanager
    def splitting(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Let compiled regions run their input halves, and leave gradients of `weights` here."""
        self.is_splitting = True
        self._weights = set(map(id, weights))
        try:
            yield
        finally:
            self.is_splitting = False

    def take(self) -> list[WaitingCall]:
        """Return what the calls have left, in the order of autograd: last calls first."""
        found, self._waiting = self._waiting, []
        return sorted(found, key=lambda call: call.sequence_number, reverse=True)


_current: ContextVar[CompiledCalls | None] = ContextVar("compiled_calls", default=None)


def note_calls_in(calls: CompiledCalls) -> Token[CompiledCalls | None]:
    """Let compiled regions that this thread calls find `calls`, until `stop_noting`."""
    return _current.set(calls)


def stop_noting(token: Token[CompiledCalls | None]) -> None:
    """Let compiled regions find what they found before."""
    _current.reset(token)


def current_calls() -> CompiledCalls | None:
    """Return the calls that the engine running in this thread notes, or None."""
    return _current.get()

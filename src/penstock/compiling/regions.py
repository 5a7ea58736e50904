"""A compiled region: a graph that torch.compile found, and its calls."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.backward.compiled_calls import CompiledCalls, current_calls
from penstock.backward.wrappers import find_node
from penstock.torch_private import COMPILED_NODE, sequence_number
from penstock.torch_private.compiler import next_sequence_number


class Call(NamedTuple):
    """One call of a region, in the forward of an engine."""

    params: Mapping[int, Tensor]
    """The parameters among its arguments, by number."""
    calls: CompiledCalls
    sequence_number: int


class Region:
    """A graph that may serve many modules: parameters belong to its calls.

    `parameters` has the shapes of those arguments that are trainable parameters, by number.
    `values` are the numbers of all that are parameters, whose values FSDP2 may free.
    Before the backward of a call runs, a hook says which call it is, in the same thread.
    """

    def __init__(
        self, name: str, parameters: Mapping[int, Sequence[int]], values: Collection[int]
    ) -> None:
        self._name = name
        self.parameters = parameters
        self.values = values
        self._entered = threading.local()

    def __str__(self) -> str:
        return self._name

    def noting_calls(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function, which notes its calls for the engine that runs them."""

        def run(*args: Any) -> Any:
            calls = current_calls()
            if calls is None or not torch.is_grad_enabled():
                return compiled(*args)
            calls.is_any_noted = True
            first = next_sequence_number()
            outputs = compiled(*args)
            # An output may be a view of what the graph returned, or of an input.
            tensors = [out for out in outputs if isinstance(out, Tensor)]
            node = find_node(tensors, COMPILED_NODE, made_since=first)
            if node is not None:
                own = {number: args[number] for number in self.parameters}
                call = Call(own, calls, sequence_number(node))
                node.register_prehook(lambda _: setattr(self._entered, "call", call))
            return outputs

        return run

    def take_call(self) -> Call | None:
        """Return the call whose backward begins now; None if no engine has run it."""
        call: Call | None = getattr(self._entered, "call", None)
        self._entered.call = None
        return call

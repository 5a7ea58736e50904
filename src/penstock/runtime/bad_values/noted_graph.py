"""The graph of a traced stage, with calls that note the values that pass between modules.

A trace has operations in place of modules, so there are no calls to hook; each operation knows the
module that it is from.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import fx

Note: TypeAlias = Callable[[Any, str, list[str]], None]
"""A function that takes a value, the module that it is from, and those that take it."""


class NotedGraph:
    """The forward of a traced module, with notes; made once for a module."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._note: Note = _note_nothing
        self._module = module

        def note_value(value: Any, source: str, takers: list[str]) -> None:
            self._note(value, source, takers)

        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op in ("placeholder", "output", "get_attr") or not _modules_of(node):
                continue
            source = _modules_of(node)
            takers = [_modules_of(user) or source for user in node.users if user.op != "output"]
            if not takers or any(taker != source for taker in takers):
                with graph.inserting_after(copies[node]):
                    graph.call_function(note_value, (copies[node], source, takers))
        self._forward = type(fx.GraphModule(module, graph)).forward

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Return a context in which the module calls `note` for each value between modules."""
        self._note = note
        self._module.forward = lambda *args, **kwargs: self._forward(self._module, *args, **kwargs)
        try:
            yield
        finally:
            del self._module.forward
            self._note = _note_nothing


def _note_nothing(value: Any, source: str, takers: list[str]) -> None:
    """Ignore a value: nobody watches."""


def _modules_of(node: fx.Node) -> str:
    """Return the name of the module that an operation is from; empty if it is not known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""

"""The backward of a compiled region: whole, or as two halves, each compiled when first needed."""

import copy
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch import SymInt, Tensor, fx

from penstock.compiling.graph_cut import GraphCut, cut_graph, part_convolutions
from penstock.compiling.regions import Region
from penstock.torch_private.compiler import (
    Setting,
    argument_of,
    argument_of_gradient,
    outputs_with_sources,
    pin_layouts,
)

Code = Callable[[list[Any]], Sequence[Any]]
"""Compiled code; it empties the list of its arguments."""


class _Halves(NamedTuple):
    """Both halves of a backward, compiled."""

    input_half: Code
    weight_half: Code
    cut: GraphCut
    params: list[int]
    """The arguments of the region whose gradients the weight half returns, by number."""


class CompiledBackward:
    """The backward graph of a region, for torch to call in place of compiled code."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        details: dict[str, Any],
        region: Region,
        options: dict[str, Any],
        make_code: Callable[..., Code],
    ) -> None:
        self._boxed_call = True  # torch gives the arguments in a list, which code empties.
        self._module = module
        self._inputs = inputs
        self._details = details
        self._region = region
        self._setting = Setting.now(options)
        self._make_code = make_code
        self._whole: Code | None = None
        self._halves: _Halves | None = None
        self._cannot_split = False
        self._has_unknown_gradients = False
        """True if nothing can wait, and torch does not say whose gradient is whose."""
        if any(isinstance(value, SymInt) for value in inputs):
            # Compiling may fix a size, which guards of the forward must know, so do it now.
            self._get_whole()
            self._get_halves()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        call = self._region.take_call()
        is_split = call is not None and call.calls.is_splitting
        if call is None or not is_split or (halves := self._get_halves()) is None:
            if is_split and self._has_unknown_gradients:
                self._warn_of_unknown_gradients()
            return self._get_whole()(args)
        params = [call.params[number] for number in halves.params]
        if not call.calls.may_wait(params):
            return self._get_whole()(args)
        kept = [args[number] for number in halves.cut.passed]
        found = halves.input_half(args)
        early = halves.cut.early_outputs
        results = [None] * (len(early) + len(halves.cut.late_outputs))
        for number, value in zip(early, found, strict=False):
            results[number] = value
        call.calls.needs_parameters |= halves.cut.needs_parameters
        call.calls.leave(
            call.sequence_number,
            halves.weight_half,
            [*found[len(early) :], *kept],
            params,
        )
        return results

    def _get_whole(self) -> Code:
        if self._whole is None:
            with self._setting.restored():
                if self._whole is None:  # Another thread may have compiled it.
                    graph = copy.deepcopy(self._module.graph)
                    self._whole = self._compile(graph, self._inputs, **self._details)
        return self._whole

    def _get_halves(self) -> _Halves | None:
        """Return the halves; None if the backward has nothing that can wait."""
        if self._halves is None and not self._cannot_split:
            with self._setting.restored():
                if self._halves is None and not self._cannot_split:
                    self._halves = self._compile_halves()
                    self._cannot_split = self._halves is None
        return self._halves

    def _compile_halves(self) -> _Halves | None:
        graph = copy.deepcopy(self._module.graph)
        part_convolutions(graph)
        outputs, sources = outputs_with_sources(graph)
        params = [argument_of_gradient(source) for source in sources]
        can_wait = [
            number is not None and _has_shape(out, self._region.parameters.get(number))
            for out, number in zip(outputs, params, strict=True)
        ]
        cut = cut_graph(graph, outputs, can_wait, self._given_parameters(graph))
        if cut is None:
            self._has_unknown_gradients = not set(self._region.parameters) <= set(params)
            return None
        for half in (cut.input_half, cut.weight_half):
            pin_layouts(half)
        given = [*(node.meta["val"] for node in cut.made), *(self._inputs[n] for n in cut.passed)]
        details = {**self._details, "static_input_idxs": ()}
        with self._setting.overwriting_nothing():
            input_half = self._compile(cut.input_half, self._inputs, **self._details)
            weight_half = self._compile(cut.weight_half, given, **details)
        return _Halves(input_half, weight_half, cut, [params[n] for n in cut.late_outputs])  # type: ignore[misc]

    def _warn_of_unknown_gradients(self) -> None:
        """Say, once for a region, why its backward is not split."""
        self._has_unknown_gradients = False
        warnings.warn(
            f"{self._region}: its backward cannot be split. Its parameters are DTensors or other "
            "subclasses, whose gradients the compiled graph has in parts. It runs whole, in the "
            "input backward: gradients are right, but bubbles stay idle. To split it, leave this "
            "part uncompiled.",
            stacklevel=2,
        )

    def _given_parameters(self, graph: fx.Graph) -> Collection[fx.Node]:
        return {
            node
            for node in graph.nodes
            if node.op == "placeholder"
            and argument_of(node.meta.get("desc")) in self._region.values
        }

    def _compile(self, graph: fx.Graph, inputs: Sequence[Any], **details: Any) -> Code:
        return self._make_code(fx.GraphModule(self._module, graph), inputs, **details)


def _has_shape(output: Any, shape: Sequence[int] | None) -> bool:
    value = output.meta.get("val") if isinstance(output, fx.Node) else None
    return isinstance(value, Tensor) and value.shape == shape

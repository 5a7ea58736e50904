"""The costs of a model's layers: counted from shapes, or measured."""

import operator
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx import Node

from penstock.cutting.assembling import assemble
from penstock.cutting.chain import Chain
from penstock.cutting.clock import seconds
from penstock.cutting.graph_layers import Layer, find_layers, mark_layers
from penstock.cutting.loss_costs import Loss, add_loss
from penstock.cutting.marks import remove_marks
from penstock.cutting.shape_counts import (
    Counter,
    LayerCost,
    counted,
    counting,
    counting_saved,
    fake_like,
)
from penstock.cutting.tracing import trace
from penstock.errors import CostError
from penstock.ir import StageId
from penstock.stage.outputs import as_arguments
from penstock.stage.passage import needs_grad, stand_in_for
from penstock.stage.unchanged import kept_as_it_was
from penstock.torch_private import pytree


def count_layers(
    model: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    *,
    layers: Sequence[Any] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
) -> list[LayerCost]:
    """Count the costs of layers from shapes alone; the model may be on the meta device.

    The layers are those of the traced model, or of `penstock.cut_between_modules` if `layers` is
    given. With `loss_fn`, the last layer has the cost of the loss too; `target` is that of one
    microbatch, which torch's own losses do not need.
    """
    loss = Loss.of(loss_fn, target)
    if layers is not None:
        found = count_chain(Chain.of(model, layers), mb_args, mb_kwargs or {})
    else:
        graph_module = trace(model, mb_args, mb_kwargs or {}, {}).graph_module
        remove_marks(graph_module)
        found = count_graph(graph_module, find_layers(graph_module))
    return add_loss(found.layers, None if loss is None else loss.count(found.outputs))


def measure_layers(
    model: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    *,
    layers: Sequence[Any] | None = None,
    repeats: int = 5,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
) -> list[LayerCost]:
    """Measure the cost of each layer on this machine; the model is left as it was.

    Each rank would measure something different: measure on one, and give its result to all.
    `loss_fn` and `target` are as in `count_layers`.
    """
    loss = Loss.of(loss_fn, target)
    if not isinstance(repeats, int) or repeats < 1:
        raise CostError(f"repeats is {repeats!r}. Expected a whole number, at least 1.")
    kwargs = mb_kwargs or {}
    if layers is not None:
        chain = Chain.of(model, layers)
        names, pipe = chain.names, chain.cut(range(len(chain.names)), is_trial=True)
    else:
        traced = trace(model, mb_args, kwargs, {})
        remove_marks(traced.graph_module)
        found = find_layers(traced.graph_module)
        mark_layers(traced.graph_module, found[1:])
        names, pipe = [layer.name for layer in found], assemble(traced)
    costs: list[LayerCost] = []

    def run(stage: StageId, module: nn.Module, args: tuple[Any, ...]) -> Any:
        with kept_as_it_was(module):
            cost, outputs = _measure(names[stage], module, args, kwargs, repeats)
        costs.append(cost)
        return outputs

    outputs = pipe.run_stages(run, mb_args)
    return add_loss(costs, None if loss is None else loss.measure(outputs, repeats))


class Counted(NamedTuple):
    """The costs of the layers of a model, and its outputs without values."""

    layers: list[LayerCost]
    outputs: Any


def count_graph(graph_module: fx.GraphModule, layers: Sequence[Layer]) -> Counted:
    """Count the costs of the layers of a traced graph."""
    with counting() as counter:
        inputs = [_fake(node) for node in graph_module.graph.find_nodes(op="placeholder")]
        interpreter = _Counting(graph_module, counter)
        outputs = interpreter.run(*inputs)
    costs, seen = [], set[Tensor]()
    for layer in layers:
        counts = [interpreter.counts[node] for node in layer.nodes]
        operations, kept = map(sum, zip(*counts, strict=True))
        used = {
            value
            for node in layer.nodes
            for source in node.all_input_nodes
            if isinstance(value := interpreter.attributes.get(source), nn.Parameter)
        }
        parameter_bytes = sum(parameter.nbytes for parameter in used - seen)
        seen |= used
        costs.append(counted(layer.name, operations, kept, parameter_bytes))
    return Counted(costs, outputs)


def count_parameters(graph_module: fx.GraphModule, layers: Sequence[Layer]) -> list[LayerCost]:
    """Return costs in proportion to the parameters of the layers; activations are not counted."""
    costs, seen = [], set[Tensor]()
    for layer in layers:
        sources = {source for node in layer.nodes for source in node.all_input_nodes}
        values = [
            operator.attrgetter(str(source.target))(graph_module)
            for source in sources
            if source.op == "get_attr"
        ]
        new = {value for value in values if isinstance(value, nn.Parameter)} - seen
        parameter_bytes = sum(parameter.nbytes for parameter in new)
        seen |= new
        costs.append(LayerCost(layer.name, max(1, parameter_bytes), parameter_bytes, 0))
    return costs


def count_chain(chain: Chain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counted:
    """Count the costs of modules that are called one after the other."""
    pipe = chain.cut(range(len(chain.names)), is_trial=True)
    costs: list[LayerCost] = []
    outputs: Any = None
    with counting() as counter:
        values: Any = pytree.tree_map_only(Tensor, fake_like, args)
        fake_kwargs = pytree.tree_map_only(Tensor, fake_like, kwargs)
        for index, name in enumerate(chain.names):
            module = pipe.get_stage_module(index)
            own = {
                name: counter.fake_for(tensor)
                for name, tensor in (*module.named_parameters(), *module.named_buffers())
            }
            outputs = functional_call(module, own, values, fake_kwargs)
            values = as_arguments(outputs)
            operations, kept = counter.take()
            parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
            costs.append(counted(name, operations, kept, parameter_bytes))
    return Counted(costs, outputs)


class _Counting(fx.Interpreter):
    """An interpreter that runs a graph and records the counts of each node."""

    def __init__(self, graph_module: fx.GraphModule, counter: Counter) -> None:
        super().__init__(graph_module)
        self.counts: dict[Node, tuple[int, int]] = {}
        self.attributes: dict[Node, Any] = {}
        self._counter = counter

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.counts[n] = self._counter.take()
        if n.op == "get_attr" and isinstance(result, Tensor):
            self.attributes[n] = result
            return self._counter.fake_for(result)
        return result

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make on the CPU what a model that was traced on the meta device makes there."""
        if kwargs.get("device") == torch.device("meta"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().call_function(target, args, kwargs)


def _fake(node: Node) -> Any:
    value = node.meta["val"]
    return fake_like(value) if isinstance(value, Tensor) else value


def _measure(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], repeats: int
) -> tuple[LayerCost, Any]:
    """Return the cost of a module, and its outputs as arguments for the next."""
    inputs = pytree.tree_map_only(Tensor, stand_in_for, args)  # As a stage receives them.
    parameters = [p for p in module.parameters() if p.requires_grad]
    times, kept = [], 0
    for number in range(repeats + 1):
        args = pytree.tree_map_only(Tensor, Tensor.clone, inputs)  # It may change them in place.
        before = seconds()
        with counting_saved() as saved:
            for parameter in module.parameters():
                saved.leave_out(parameter)
            outputs = module(*args, **kwargs)
        roots = [leaf for leaf in pytree.tree_leaves(outputs) if needs_grad(leaf)]
        wanted = [*filter(needs_grad, pytree.tree_leaves(inputs)), *parameters]
        if roots and wanted:
            torch.autograd.grad(
                roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True
            )
        if number:  # The first one only warms up.
            times.append(seconds() - before)
        kept = saved.num_bytes
    parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
    return LayerCost(name, statistics.median(times), parameter_bytes, kept), outputs

"""The stages of a traced and marked model, as modules with the model's own names."""

import copy
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from penstock.cutting.cut_model import CutModel
from penstock.cutting.flow import Flow, find_flow
from penstock.cutting.model_names import Names, install
from penstock.cutting.restored import module_of, restore
from penstock.cutting.tracing import Trace
from penstock.cutting.training_mode import follow_training_mode
from penstock.ir import StageId
from penstock.torch_private import own_buffers, own_modules, own_parameters


def assemble(trace: Trace) -> CutModel:
    """Cut a traced model at its marks."""
    flow = find_flow(trace.graph_module)
    modules = [
        fx.GraphModule(trace.graph_module, _graph_of(stage, flow, trace), f"Stage{stage}")
        for stage in range(flow.num_stages)
    ]
    tied = _install_all(trace, modules)
    for module in modules:
        module.train(trace.model.training)
    starts = [_describe(nodes[0]) for nodes in flow.computed[1:]]
    given = {
        pair: [f"{node.name} {_form(node.meta.get('val'))}" for node in nodes]
        for pair, nodes in flow.given.items()
    }
    return CutModel(modules, tied, starts, given)


def _graph_of(stage: StageId, flow: Flow, trace: Trace) -> fx.Graph:
    """Return the graph of one stage, whose attributes have the names of the traced graph."""
    graph = fx.Graph()
    copies: dict[Node, Node] = {}
    modules = dict(trace.model.named_modules(remove_duplicate=False))
    _add_inputs(graph, copies, stage, flow, trace)

    def copied(node: Node) -> Node:
        # Attributes and constants are copied where they are first used.
        if node not in copies:
            assert node.op == "get_attr" or node in flow.constants, node
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in flow.computed[stage]:
        name = module_of(node, trace.graph_module, modules)
        if name is None:
            copies[node] = graph.node_copy(node, copied)
        else:
            copies[node] = graph.call_module(name, fx.map_arg(node.args[:1], copied))
            copies[node].meta = dict(node.meta)
    if stage < flow.num_stages - 1:
        graph.output(tuple(copied(node) for node in flow.given_by(stage)))
    else:
        (output,) = (node for node in trace.graph_module.graph.nodes if node.op == "output")
        values = fx.map_arg(list(output.args[0]), copied)
        graph.output(graph.call_function(trace.give_outputs, (values,)))
    if trace.model.training:
        follow_training_mode(graph)
    return graph


def _add_inputs(
    graph: fx.Graph, copies: dict[Node, Node], stage: StageId, flow: Flow, trace: Trace
) -> None:
    """Let a stage take the model's arguments, or the values that earlier stages give it."""
    inputs, kwargs = graph.placeholder("*args"), graph.placeholder("**kwargs")
    values: Sequence[Node]
    if stage == 0:
        values = trace.graph_module.graph.find_nodes(op="placeholder")
        inputs = graph.call_function(trace.take_inputs, (inputs, kwargs))
    else:
        # Only the first stage uses keyword arguments, but a rank gives them to all its stages.
        values = flow.taken(stage)
    for number, node in enumerate(values):
        if not node.users:
            continue
        own = graph.create_node("call_function", operator.getitem, (inputs, number), name=node.name)
        own.meta = dict(node.meta)
        if node in flow.written[stage]:
            # An input of a stage is a leaf, and autograd does not allow changing one in place.
            own = graph.call_function(torch.ops.aten.clone.default, (own,))
        copies[node] = own


def _install_all(trace: Trace, modules: list[fx.GraphModule]) -> list[dict[str, str]]:
    """Give each stage the attributes that it uses; return the tied parameters of each.

    A parameter or buffer with several names has all of them in every stage that holds it. One
    that no stage uses goes to a stage that holds the nearest names.
    """
    names = Names(trace.model)
    holders: defaultdict[Tensor, list[StageId]] = defaultdict(list)
    others: list[dict[str, Any]] = [{} for _ in modules]
    for stage, module in enumerate(modules):
        for target in _attributes(module.graph, trace.model):
            value = operator.attrgetter(target)(trace.graph_module)
            if not isinstance(value, Tensor) or value not in names:
                others[stage][target] = value
            elif stage not in holders[value]:
                holders[value].append(stage)
        # The graph module has them already, but in the graph's order.
        for attributes in (own_parameters(module), own_buffers(module), own_modules(module)):
            attributes.clear()
    names.add_unused(holders)
    tied: list[dict[str, str]] = [{} for _ in modules]
    for value in names:
        for stage in holders[value]:
            own = names.install(modules[stage], value, is_first=stage == holders[value][0])
            if isinstance(own, nn.Parameter) and len(holders[value]) > 1:
                tied[stage][names.of(value)[0]] = names.of(value)[0]
    for module, rest in zip(modules, others, strict=True):
        for target, value in rest.items():
            if isinstance(value, fx.GraphModule):
                value = _copy_graph_within(value, trace.model.training)
            install(module, target, value, is_persistent=False, is_constant=True)
        for node in module.graph.find_nodes(op="call_module"):
            restore(module, str(node.target), trace.model.get_submodule(str(node.target)))
    return tied


def _copy_graph_within(graph_module: fx.GraphModule, is_training: bool) -> fx.GraphModule:
    """Return a copy for one stage: another may run the same graph, on another device."""
    own = copy.deepcopy(graph_module)
    if is_training:
        follow_training_mode(own.graph)
        own.recompile()
    return own


def _attributes(graph: fx.Graph, model: nn.Module) -> Iterable[str]:
    """Return the attributes that a graph uses, and the parameters of modules that it calls."""
    targets = [str(node.target) for node in graph.find_nodes(op="get_attr")]
    for node in graph.find_nodes(op="call_module"):
        module = model.get_submodule(str(node.target))
        targets += [f"{node.target}.{name}" for name, _ in module.named_parameters()]
    return dict.fromkeys(targets)


def _describe(node: Node) -> str:
    """Describe where a stage begins: the module whose forward this is in, and the operation."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    return f"{modules[-1][0] or 'forward'} ({node.name})" if modules else node.name


def _form(value: Any) -> str:
    """Describe the form of a value: dtype and shape of a tensor, or the class."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__

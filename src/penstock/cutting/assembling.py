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
from penstock.cutting.tracing import Trace, make_take_values
from penstock.cutting.training_mode import follow_training_mode
from penstock.errors import PartitionError, TraceError
from penstock.ir import StageId
from penstock.torch_private import own_buffers, own_modules, own_parameters


class StageGraph(fx.GraphModule):
    """The module of a traced stage."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TraceError(
            "the module of a traced stage cannot be pickled, as its graph calls functions that "
            "the trace made. Save its state_dict(), and cut the model again where it is loaded."
        )


def assemble(trace: Trace) -> CutModel:
    """Cut a traced model at its marks."""
    return assemble_along(find_flow(trace.graph_module), trace)


def assemble_along(flow: Flow, trace: Trace, *, is_flat: bool = False) -> CutModel:
    """Return the stages of a traced model whose flow is known.

    If `is_flat`, stages are as torch's: the last returns the values that it makes itself, without
    the model's containers, a single value is returned as it is, and stages hold only what they
    use, with all buffers in their state dicts.
    """
    modules = [
        StageGraph(trace.graph_module, _graph_of(stage, flow, trace, is_flat), f"Stage{stage}")
        for stage in range(flow.num_stages)
    ]
    tied = _install_all(trace, modules, is_flat)
    for module in modules:
        module.train(trace.model.training)
    starts = [_describe(nodes[0]) for nodes in flow.computed[1:]]
    given = {
        pair: [f"{node.name} {_form(node.meta.get('val'))}" for node in nodes]
        for pair, nodes in flow.given.items()
    }
    return CutModel(modules, tied, starts, given)


def _graph_of(stage: StageId, flow: Flow, trace: Trace, is_flat: bool) -> fx.Graph:
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
    if is_flat:
        values = [copied(node) for node in returned_by(stage, flow, trace)]
        graph.output(values[0] if len(values) == 1 else tuple(values))
    elif stage < flow.num_stages - 1:
        graph.output(tuple(copied(node) for node in flow.given_by(stage)))
    else:
        values = fx.map_arg(trace.results, copied)
        graph.output(graph.call_function(trace.give_outputs, (values,)))
    if trace.model.training:
        follow_training_mode(graph)
    return graph


def returned_by(stage: StageId, flow: Flow, trace: Trace) -> list[Node]:
    """Return the values that a stage returns if it is flat, each once if it is the last."""
    if stage < flow.num_stages - 1:
        return flow.given_by(stage)
    taken = {*flow.taken(stage), *trace.graph_module.graph.find_nodes(op="placeholder")}
    taken.difference_update(flow.written[stage])  # It changes copies of these.
    results = (node for node in trace.results if isinstance(node, Node))
    own = [node for node in dict.fromkeys(results) if node not in taken]
    if not own:
        raise PartitionError(
            f"the last stage, {stage}, computes none of the model's outputs, so a step would "
            "return nothing. Move the last cut point to an earlier place, or remove it."
        )
    return own


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
        values = flow.taken(stage)
        take_values = make_take_values(trace.inputs, stage)
        inputs = graph.call_function(take_values, (inputs, kwargs))
    for number, node in enumerate(values):
        if not node.users:
            continue
        own = graph.create_node("call_function", operator.getitem, (inputs, number), name=node.name)
        own.meta = dict(node.meta)
        if node in flow.written[stage]:
            # An input of a stage is a leaf, and autograd does not allow changing one in place.
            own = graph.call_function(torch.ops.aten.clone.default, (own,))
        copies[node] = own


def _install_all(
    trace: Trace, modules: Sequence[fx.GraphModule], is_flat: bool
) -> list[dict[str, str]]:
    """Give each stage the attributes that it uses; return the tied parameters of each.

    A parameter or buffer with several names has all of them in every stage that holds it. One
    that no stage uses goes to a stage that holds the nearest names. If `is_flat`, a stage has only
    the names that it uses.
    """
    names = Names(trace.model)
    used = [_names_used(module.graph, trace.model) for module in modules]
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
    if not is_flat:
        names.add_unused(holders)
    tied: list[dict[str, str]] = [{} for _ in modules]
    for value in names:
        for stage in holders.get(value, ()):
            own_names = [n for n in names.of(value) if not is_flat or n in used[stage]]
            own = names.install(
                modules[stage],
                value,
                own_names,
                is_first=stage == holders[value][0],
                saves_all=is_flat,
            )
            if isinstance(own, nn.Parameter) and len(holders[value]) > 1:
                tied[stage][own_names[0]] = names.of(value)[0]
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


def _names_used(graph: fx.Graph, model: nn.Module) -> set[str]:
    """Return the attributes that a graph uses, under all names that modules called there have."""
    names = set(_attributes(graph, model))
    called = {
        str(entry[0])
        for node in graph.nodes
        for entry in (node.meta.get("nn_module_stack") or {}).values()
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix in called & modules.keys():
        module = modules[prefix]
        for name in (*own_parameters(module), *own_buffers(module)):
            names.add(f"{prefix}.{name}" if prefix else name)
    return names


def _describe(node: Node) -> str:
    """Describe where a stage begins: the module whose forward this is in, and the operation."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    return f"{modules[-1][0] or 'forward'} ({node.name})" if modules else node.name


def _form(value: Any) -> str:
    """Describe the form of a value: dtype and shape of a tensor, or the class."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__

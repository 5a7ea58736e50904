"""The stages of a traced model as children of one graph module, which shows how they are joined.

torch's pipes have the same under `split_gm`, so these are its names.
"""

import operator
from typing import Any, NoReturn

from torch import fx, nn
from torch.fx import Node

from penstock.cutting.assembling import returned_by
from penstock.cutting.flow import Flow
from penstock.cutting.tracing import Trace
from penstock.errors import StepError
from penstock.ir import StageId


def child_name(stage_idx: StageId) -> str:
    """Return the name of a stage's module, as torch has it."""
    return f"submod_pp_{stage_idx}"


class JoinedStages(fx.GraphModule):
    """A graph that calls each stage. It is for reading: calling it is an error, as torch's is."""

    def recompile(self) -> Any:
        code = super().recompile()
        # The code just made would be the forward of this instance's own class.
        type(self).forward = _refuse
        return code


def _refuse(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise StepError(
        "split_gm was called, but it only shows how the stages are joined. To run all stages in "
        "this process, call the pipe itself: pipe(…)."
    )


class StageRunner(fx.Interpreter):
    """Runs the stages of a joined graph; the first one gets the arguments as they are nested."""

    def __init__(self, joined: JoinedStages, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(joined)
        self._first = args, kwargs

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == child_name(0):
            args, kwargs = self._first
        return super().call_module(target, args, kwargs)


def join(modules: list[nn.Module], flow: Flow, trace: Trace) -> JoinedStages:
    """Return the stages as children of a graph module whose results are those of the model."""
    graph = fx.Graph()
    values: dict[Node, Node] = {}
    for node in trace.graph_module.graph.find_nodes(op="placeholder"):
        values[node] = graph.placeholder(str(node.target))
        values[node].meta = dict(node.meta)
    inputs = list(values.values())
    received: dict[tuple[StageId, Node], Node] = {}
    for stage in range(flow.num_stages):
        args = inputs if stage == 0 else [received[stage, node] for node in flow.taken(stage)]
        call = graph.call_module(child_name(stage), tuple(args))
        returned = returned_by(stage, flow, trace)
        parts = [call]
        if len(returned) > 1:
            parts = [
                graph.call_function(operator.getitem, (call, place))
                for place in range(len(returned))
            ]
        values.update(zip(returned, parts, strict=True))
        parts_left = iter(parts)
        for target in range(stage + 1, flow.num_stages):
            for node in flow.given.get((stage, target), ()):
                received[target, node] = next(parts_left)
    graph.output(tuple(fx.map_arg(trace.results, values.__getitem__)))
    children = {child_name(stage): module for stage, module in enumerate(modules)}
    return JoinedStages(nn.ModuleDict(children), graph, "GraphModule")

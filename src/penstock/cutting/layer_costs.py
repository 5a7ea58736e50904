"""The costs of a model's layers: counted from shapes, or measured."""

import operator
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode

from penstock.cutting.assembling import assemble
from penstock.cutting.chain import Chain
from penstock.cutting.graph_layers import Layer, find_layers, mark_layers
from penstock.cutting.marks import remove_marks
from penstock.cutting.own_backwards import ONE_AT_A_TIME
from penstock.cutting.stand_ins import are_on_host
from penstock.cutting.tracing import trace
from penstock.errors import CostError
from penstock.ir import StageId
from penstock.stage.outputs import as_arguments
from penstock.stage.passage import needs_grad, stand_in_for
from penstock.stage.unchanged import kept_as_it_was
from penstock.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    pytree,
)

# A forward and the two halves of its backward do about the same work.
_PASSES = 3
# The number of operations a machine does in the time it takes to move a byte: about 5 on a CPU,
# 100 and more on accelerators. It decides how much layers count that hardly compute.
_OPERATIONS_PER_BYTE = 20


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer for one microbatch."""

    name: str
    time: float
    """The time of forward and backward: seconds if measured, operations if counted."""
    parameter_bytes: float
    activation_bytes: float
    """The bytes that its forward holds for its backward."""


def count_layers(
    model: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    *,
    layers: Sequence[Any] | None = None,
) -> list[LayerCost]:
    """Count the costs of layers from shapes alone; the model may be on the meta device.

    The layers are those of the traced model, or of `penstock.cut_between_modules` if `layers` is
    given.
    """
    if layers is not None:
        return count_chain(Chain.of(model, layers), mb_args, mb_kwargs or {})
    graph_module = trace(model, mb_args, mb_kwargs or {}, {}).graph_module
    remove_marks(graph_module)
    return count_graph(graph_module, find_layers(graph_module))


def measure_layers(
    model: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    *,
    layers: Sequence[Any] | None = None,
    repeats: int = 5,
) -> list[LayerCost]:
    """Measure the cost of each layer on this machine; the model is left as it was.

    Each rank would measure something different: measure on one, and give its result to all.
    """
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

    pipe.run_stages(run, mb_args)
    return costs


def count_graph(graph_module: fx.GraphModule, layers: Sequence[Layer]) -> list[LayerCost]:
    """Count the costs of the layers of a traced graph."""
    with _counting() as counter:
        inputs = [_fake(node) for node in graph_module.graph.find_nodes(op="placeholder")]
        interpreter = _Counting(graph_module, counter, are_on_host=are_on_host(inputs))
        interpreter.run(*inputs)
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
    return costs


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


def count_chain(chain: Chain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LayerCost]:
    """Count the costs of modules that are called one after the other."""
    pipe = chain.cut(range(len(chain.names)), is_trial=True)
    costs = []
    with _counting() as counter:
        values: Any = pytree.tree_map_only(Tensor, _fake_like, args)
        fake_kwargs = pytree.tree_map_only(Tensor, _fake_like, kwargs)
        for index, name in enumerate(chain.names):
            module = pipe.get_stage_module(index)
            own = {
                name: counter.stand_in_for(t)
                for name, t in module.state_dict(keep_vars=True).items()
            }
            values = as_arguments(functional_call(module, own, values, fake_kwargs))
            operations, kept = counter.take()
            parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
            costs.append(counted(name, operations, kept, parameter_bytes))
    return costs


def count_loss(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    *,
    target: Any,
) -> LayerCost:
    """Count the cost of a loss from shapes alone, as the costs of layers are counted.

    `target` is that of one microbatch. Give the result to `Balanced(…, loss=…)`.
    """
    with _counting() as counter:
        args, kwargs, wanted = pytree.tree_map_only(
            Tensor, _fake_like, (mb_args, mb_kwargs or {}, target)
        )
        is_on_host = are_on_host((mb_args, mb_kwargs))
        own = {
            name: counter.stand_in_for(tensor, is_on_host=is_on_host)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        outputs = functional_call(model, own, args, kwargs)
        counter.take()  # What the model itself costs.
        loss_fn(outputs, wanted)
        operations, kept = counter.take()
    return counted("loss", operations, kept, 0)


def counted(name: str, operations: int, kept: int, parameter_bytes: int) -> LayerCost:
    """Return the cost of a layer with these counts for one forward."""
    work = _PASSES * (operations + _OPERATIONS_PER_BYTE * kept)
    return LayerCost(name, work, parameter_bytes, kept)


class _Counter:
    """Counts of operations and of bytes held for a backward, on tensors without values."""

    def __init__(self, mode: FakeTensorMode, operations: FlopCounterMode, saved: "_Saved") -> None:
        self._mode = mode
        self._operations = operations
        self._saved = saved
        self._taken = 0, 0

    def take(self) -> tuple[int, int]:
        """Return the operations and bytes since the last call."""
        now = self._operations.get_total_flops(), self._saved.num_bytes
        before, self._taken = self._taken, now
        return now[0] - before[0], now[1] - before[1]

    def stand_in_for(self, tensor: Tensor, *, is_on_host: bool = False) -> Tensor:
        """Return a tensor without values for one of the model; it is not counted as held.

        If `is_on_host`, a tensor on the meta device gets one on the CPU, as in the trace.
        """
        fake: Tensor = self._mode.from_tensor(tensor)
        if is_on_host and tensor.is_meta:
            fake = torch.empty_like(fake, device="cpu", requires_grad=tensor.requires_grad)
        self._saved.leave_out(fake)
        return fake


@contextmanager
def _counting() -> Iterator[_Counter]:
    try:
        with (
            ONE_AT_A_TIME,
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            FlopCounterMode(display=False) as operations,
            counting_saved() as saved,
        ):
            yield _Counter(mode, operations, saved)
    except (DataDependentOutputException, DynamicOutputShapeException) as exc:
        raise CostError(
            f"costs cannot be counted from shapes: the result of {exc.func} depends on the values "
            "of its input. Give the costs: penstock.Balanced(num_stages, costs=…), with the "
            "result of penstock.measure_layers() or one number per layer."
        ) from exc


class _Counting(fx.Interpreter):
    """An interpreter that runs a graph and records the counts of each node."""

    def __init__(
        self, graph_module: fx.GraphModule, counter: _Counter, *, are_on_host: bool
    ) -> None:
        super().__init__(graph_module)
        self._are_on_host = are_on_host
        self.counts: dict[Node, tuple[int, int]] = {}
        self.attributes: dict[Node, Any] = {}
        self._counter = counter

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.counts[n] = self._counter.take()
        if n.op == "get_attr" and isinstance(result, Tensor):
            self.attributes[n] = result
            return self._counter.stand_in_for(result, is_on_host=self._are_on_host)
        return result


def _fake(node: Node) -> Any:
    value = node.meta["val"]
    return _fake_like(value) if isinstance(value, Tensor) else value


def _fake_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the current mode, without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _measure(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], repeats: int
) -> tuple[LayerCost, Any]:
    """Return the cost of a module, and its outputs as arguments for the next."""
    inputs = pytree.tree_map_only(Tensor, stand_in_for, args)  # As a stage receives them.
    parameters = [p for p in module.parameters() if p.requires_grad]
    times, kept = [], 0
    for number in range(repeats + 1):
        args = pytree.tree_map_only(Tensor, Tensor.clone, inputs)  # It may change them in place.
        before = _now()
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
            times.append(_now() - before)
        kept = saved.num_bytes
    parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
    return LayerCost(name, statistics.median(times), parameter_bytes, kept), outputs


def _now() -> float:
    """Return the time in seconds, once the accelerator has finished its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


class _Saved:
    """The bytes held for a backward, counting each storage once."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: set[torch.UntypedStorage] = set()

    def leave_out(self, tensor: Tensor) -> None:
        self._seen.add(tensor.untyped_storage())

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self.num_bytes += storage.nbytes()
        return tensor


@contextmanager
def counting_saved() -> Iterator[_Saved]:
    """Count the bytes that forwards in the context hold for their backwards."""
    saved = _Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved

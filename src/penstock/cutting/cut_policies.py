"""The policy that decides where to cut a model from the costs of its layers."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import fx

from penstock.cutting.graph_layers import Layer, find_layers, mark_layers
from penstock.cutting.layer_costs import count_graph, count_parameters
from penstock.cutting.loss_costs import Loss, add_loss
from penstock.cutting.shape_counts import LayerCost
from penstock.errors import CostError
from penstock.ir import Placement
from penstock.partition import MemoryLimit, Partition, balance

LOGGER = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Balanced:
    """A `split_policy` that makes the slowest rank as fast as possible.

    `costs` is the result of `penstock.measure_layers`, or one number per layer. Without it, costs
    are counted from shapes, which gives the same result on all ranks; where the values of tensors
    decide how much is computed, the parameters of layers are. `placement` says which rank
    holds which stage, if each holds several. With `memory`, in bytes, no rank holds more:
    parameters count `bytes_per_parameter_byte` times (by default with their gradient and Adam's
    two moments), and activations as often as `in_flight` says, by default as 1F1B holds them.
    With two stages per rank, the slowest rank may be slower by the share `slack` if that makes
    the slowest stage faster: repeated measurements of costs differ by more than that.
    With `loss_fn`, the loss counts with the last layer, unless costs are those of parameters.
    `target` is that of one microbatch, which torch's own losses do not need; the log says so if
    the loss could not be counted. `loss` is its cost, if you know that in place of both.
    `speeds` has the speed of each rank, if they differ; `on_choice` is called with what was chosen.
    """

    num_stages: int
    _: KW_ONLY
    costs: Sequence[LayerCost | float] | None = None
    placement: Placement | None = None
    slack: float = 0.05
    memory: float | None = None
    in_flight: int | Sequence[int] | None = None
    bytes_per_parameter_byte: float = 4.0
    loss: LayerCost | None = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    target: Any = field(default=None, repr=False, compare=False)
    speeds: Sequence[float] | None = None
    on_choice: Callable[[Partition], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        Loss.of(self.loss_fn, self.target)
        given = "loss_fn" if self.loss is None else "loss"
        if self.costs is not None and (self.loss is not None or self.loss_fn is not None):
            raise CostError(
                f"costs and {given} were both given, and the loss would not be counted. Expected "
                "the loss in the costs: measure_layers(…, loss_fn=…) and count_layers(…, "
                "loss_fn=…) add it to that of the last layer."
            )
        if self.loss is not None and self.loss_fn is not None:
            raise CostError(
                "loss and loss_fn were both given, and each says what the loss costs. Give one."
            )

    @property
    def knows_loss(self) -> bool:
        """True if the policy was given the loss, or costs that are to include it."""
        return any(given is not None for given in (self.costs, self.loss, self.loss_fn))

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Mark the cuts in a traced graph."""
        layers = find_layers(graph_module, at_least=self.num_stages)
        costs = self._count(graph_module, layers) if self.costs is None else self.costs
        starts = self.choose(costs, [layer.name for layer in layers])
        mark_layers(graph_module, [layers[start] for start in starts[1:]])
        return graph_module

    def choose(self, costs: Sequence[LayerCost | float], names: Sequence[str]) -> tuple[int, ...]:
        """Return the index of the first layer of each stage."""
        if len(costs) != len(names):
            raise CostError(
                f"costs has {len(costs)} values, but the model has {len(names)} layers: "
                f"{', '.join(names)}. Give one value for each layer."
            )
        times = [cost.time if isinstance(cost, LayerCost) else cost for cost in costs]
        partition = balance(
            times,
            self.num_stages,
            placement=self.placement,
            memory=self._memory(costs),
            slack=self.slack,
            speeds=self.speeds,
        )
        if self.on_choice is not None:
            self.on_choice(partition)
        return partition.starts

    def _count(self, graph_module: fx.GraphModule, layers: Sequence[Layer]) -> Sequence[LayerCost]:
        """Count costs from shapes if these are known, otherwise by parameters."""
        try:
            return self.with_loss(*count_graph(graph_module, layers))
        except CostError as exc:
            LOGGER.info("stages are balanced by the bytes of their parameters: %s", exc)
            return count_parameters(graph_module, layers)

    def with_loss(self, costs: Sequence[LayerCost], outputs: Any) -> Sequence[LayerCost]:
        """Return the costs of layers with that of the loss, which is computed from `outputs`."""
        return add_loss(costs, self.loss or self._count_loss(outputs))

    def _count_loss(self, outputs: Any) -> LayerCost | None:
        """Return what the loss costs; None, and a line in the log, if that is not known."""
        loss = Loss.of(self.loss_fn, self.target)
        if loss is None:
            return None
        if loss.find_target(outputs) is None:
            LOGGER.info(
                "the balanced cut does not count the loss: its target does not follow from the "
                "output, and none was given. Give parallelize() an example_target, or Balanced "
                "the target of one microbatch."
            )
            return None
        try:
            return loss.count(outputs)
        except Exception as error:  # It is the caller's own, and only a hint is lost.
            LOGGER.warning("the balanced cut does not count the loss: %r", error)
            return None

    def _memory(self, costs: Sequence[LayerCost | float]) -> MemoryLimit | None:
        if self.memory is None:
            return None
        layers = [cost for cost in costs if isinstance(cost, LayerCost)]
        if len(layers) < len(costs):
            raise CostError(
                "costs holds plain numbers, which do not say how much memory a layer needs. "
                "Give the result of penstock.measure_layers() or count_layers()."
            )
        in_flight = self.in_flight
        if in_flight is None:
            in_flight = [self.num_stages - stage for stage in range(self.num_stages)]
        return MemoryLimit(
            cap=self.memory,
            fixed=[
                cost.parameter_bytes * self.bytes_per_parameter_byte + cost.backward_bytes
                for cost in layers
            ],
            per_microbatch=[cost.activation_bytes for cost in layers],
            in_flight=in_flight,
        )

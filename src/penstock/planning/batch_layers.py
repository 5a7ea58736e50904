"""The costs of layers for microbatches of any size."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from penstock.cutting import LayerCost, count_layers, measure_layers
from penstock.errors import CostError
from penstock.microbatches import split_args_kwargs_into_chunks
from penstock.microbatches.splitting import split_target
from penstock.planning.checked_counts import to_amount
from penstock.torch_private import pytree

LOGGER = logging.getLogger("penstock")


class LayersOfBatch(Protocol):
    """The layers of a model, and the batch that it is given."""

    @property
    def batch_size(self) -> int:
        """The number of samples in the batch."""

    def costs(self, num_microbatches: int) -> Sequence[LayerCost]:
        """Return the costs for one of `num_microbatches` microbatches of equal size."""


@dataclass(frozen=True, slots=True)
class GivenLayers:
    """Costs that were found for microbatches of `mb_size`, scaled to other sizes."""

    given: Sequence[LayerCost]
    mb_size: int
    batch_size: int

    def __post_init__(self) -> None:
        if not self.given or not all(isinstance(cost, LayerCost) for cost in self.given):
            raise CostError(
                f"The costs of layers are {self.given!r}. Expected at least one LayerCost: those "
                "of penstock.count_layers() or measure_layers(), or your own."
            )

        for index, cost in enumerate(self.given):
            for name in ("time", "parameter_bytes", "activation_bytes", "backward_bytes"):
                to_amount(f"layers[{index}].{name}", getattr(cost, name))

    def costs(self, num_microbatches: int) -> list[LayerCost]:
        factor = self.batch_size / num_microbatches / self.mb_size
        return [
            replace(
                cost,
                time=cost.time * factor,
                activation_bytes=cost.activation_bytes * factor,
                backward_bytes=cost.backward_bytes * factor,
            )
            for cost in self.given
        ]


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """Costs that are counted or measured with the first microbatch of a batch."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layers: Sequence[Any] | None
    measure: bool
    speed: float
    loss_fn: Callable[[Any, Any], Any] | None
    target: Any

    def __post_init__(self) -> None:
        tensors = [
            leaf
            for leaf in (*pytree.tree_leaves((self.args, self.kwargs)), *self.model.parameters())
            if isinstance(leaf, Tensor)
        ]
        if self.measure and any(tensor.is_meta for tensor in tensors):
            raise CostError(
                "measure is True, but the model or the batch is on the meta device, where nothing "
                "is computed. Leave measure out to count costs from shapes, or move both to the "
                "device to measure on."
            )

    @property
    def batch_size(self) -> int:
        """The size of the first tensor along the dimension that microbatches are cut on."""
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) > 0:
                return len(leaf)
        raise CostError(
            "batch has no tensor that can be cut into microbatches. Expected the arguments of "
            "the model for a whole batch, as a tuple, or keyword arguments as kwargs."
        )

    def costs(self, num_microbatches: int) -> list[LayerCost]:
        verb = "measuring" if self.measure else "counting"
        LOGGER.info("planning: %s layers for %d microbatches", verb, num_microbatches)
        args, kwargs = split_args_kwargs_into_chunks(self.args, self.kwargs, num_microbatches)
        find = measure_layers if self.measure else count_layers
        target = None if self.target is None else split_target(self.target, num_microbatches)[0]
        found = find(
            self.model,
            args[0],
            kwargs[0],
            layers=self.layers,
            loss_fn=self.loss_fn,
            target=target,
        )
        return [replace(cost, time=cost.time / self.speed) for cost in found]

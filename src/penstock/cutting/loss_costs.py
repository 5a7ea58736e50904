"""The cost of a loss, which the rank of the last stage computes on top of its layers."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from penstock.cutting.clock import seconds
from penstock.cutting.shape_counts import (
    LayerCost,
    counted,
    counting,
    counting_saved,
    fake_like,
)
from penstock.errors import CostError
from penstock.stage.passage import needs_grad
from penstock.torch_private import TorchDispatchMode, pytree

# Losses of torch whose target follows from the output: one class for each place, or its form.
_OF_CLASSES = (functional.cross_entropy, functional.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)
_OF_VALUES = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.kl_div,
    functional.poisson_nll_loss,
    functional.soft_margin_loss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
)


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function, and the target of one microbatch if one was given."""

    function: Callable[[Any, Any], Any]
    target: Any = None

    @classmethod
    def of(cls, loss_fn: Any, target: Any) -> "Loss | None":
        """Check what was given; None if there is no loss."""
        if loss_fn is None:
            if target is not None:
                raise CostError(
                    "target was given without loss_fn, and nothing is computed from it. Give both, "
                    "or leave it out."
                )
            return None
        if not callable(loss_fn):
            raise CostError(
                f"loss_fn is {loss_fn!r}. Expected a function of the output and the target. If the "
                "model computes its own loss, leave it out: it counts with the last layer."
            )
        return cls(loss_fn, target)

    def count(self, outputs: Any) -> LayerCost:
        """Count the cost from shapes alone; `outputs` are those of the model."""
        with counting() as counter:
            target = self._target_for(outputs)
            where = _device_of(outputs)
            outputs = pytree.tree_map_only(Tensor, lambda tensor: _leaf(tensor, where), outputs)
            target = pytree.tree_map_only(
                Tensor, lambda tensor: fake_like(tensor, device=where), target
            )
            for tensor in _tensors(target):
                counter.leave_out(tensor)
            with _Alive(outputs, target) as alive:
                roots = _roots(self.function(outputs, target))
                operations, kept = counter.take()
                alive.restart()
                _run_backward(roots, outputs)
        return replace(counted("loss", operations, kept, 0), backward_bytes=alive.peak)

    def measure(self, outputs: Any, repeats: int) -> LayerCost:
        """Measure the cost on this machine."""
        target = self._target_for(outputs)
        outputs = pytree.tree_map_only(Tensor, _as_leaf, outputs)
        with counting_saved() as saved, _Alive(outputs, target) as alive:  # This also warms up.
            for tensor in _tensors(target):
                saved.leave_out(tensor)
            roots = _roots(self.function(outputs, target))
            alive.restart()
            _run_backward(roots, outputs)
        times = []
        for _ in range(repeats):
            before = seconds()
            _run_backward(_roots(self.function(outputs, target)), outputs)
            times.append(seconds() - before)
        return LayerCost("loss", statistics.median(times), 0, saved.num_bytes, alive.peak)

    def find_target(self, outputs: Any) -> Any:
        """Return the target, or zeros if its form follows from the outputs; else None."""
        if self.target is not None:
            return self.target
        function = self._plain_function
        kind = type(function) if isinstance(function, nn.Module) else function
        if not isinstance(outputs, Tensor) or outputs.dim() == 0:
            return None
        if kind in _OF_VALUES:
            return torch.zeros(outputs.shape, dtype=outputs.dtype, device=outputs.device)
        if kind in _OF_CLASSES:
            shape = outputs.shape[:1] + outputs.shape[2:] if outputs.dim() > 1 else ()
            return torch.zeros(shape, dtype=torch.long, device=outputs.device)
        return None

    @property
    def _plain_function(self) -> Any:
        function: Any = self.function
        while isinstance(function, partial) and not function.args:
            function = function.func
        return function

    def _target_for(self, outputs: Any) -> Any:
        target = self.find_target(outputs)
        if target is None:
            function = self._plain_function
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise CostError(
                f"the target of loss_fn, which is {name}, is not known: only for losses of torch "
                "does it follow from the output, if that is a tensor. Give the target: that "
                "of one microbatch, and to a plan that of the whole batch."
            )
        return target


def count_loss(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    *,
    target: Any = None,
) -> LayerCost:
    """Count the cost of a loss from shapes alone, as the costs of layers are counted.

    `target` is that of one microbatch; torch's own losses need none. `count_layers(…, loss_fn=…)`
    and `Balanced(…, loss_fn=…)` count it with the layers.
    """
    loss = Loss.of(loss_fn, target)
    assert loss is not None
    with counting() as counter:
        args, kwargs = pytree.tree_map_only(Tensor, fake_like, (mb_args, mb_kwargs or {}))
        own = {
            name: counter.fake_for(tensor)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        outputs = functional_call(model, own, args, kwargs)
    return loss.count(outputs)


def add_loss(costs: Sequence[LayerCost], loss: LayerCost | None) -> list[LayerCost]:
    """Return the costs of layers with that of the loss, which the last stage computes."""
    if loss is None or not costs:
        return list(costs)
    *others, last = costs
    both = replace(
        last,
        time=last.time + loss.time,
        activation_bytes=last.activation_bytes + loss.activation_bytes,
        backward_bytes=last.backward_bytes + loss.backward_bytes,
    )
    return [*others, both]


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """A mode that counts the bytes of tensors that operations make, as long as they are alive."""

    def __init__(self, *given: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self._known = WeakSet(tensor.untyped_storage() for tensor in _tensors(given))
        self._now = self._before = self._most = 0

    @property
    def peak(self) -> int:
        """The most bytes that were alive, beyond those at the last restart."""
        return self._most - self._before

    def restart(self) -> None:
        self._before = self._most = self._now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self._now += storage.nbytes()
                finalize(storage, self._free, storage.nbytes())
        self._most = max(self._most, self._now)
        return results

    def _free(self, num_bytes: int) -> None:
        self._now -= num_bytes


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _device_of(outputs: Any) -> torch.device:
    """Return where outputs without values are in place of a model's, which may be on meta."""
    devices = [tensor.device for tensor in _tensors(outputs) if not tensor.is_meta]
    return devices[0] if devices else torch.device("cpu")


def _leaf(tensor: Tensor, device: torch.device) -> Tensor:
    return _as_leaf(fake_like(tensor, device=device))


def _as_leaf(tensor: Tensor) -> Tensor:
    """Return the tensor without its history, for which the loss computes a gradient."""
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _roots(loss: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(loss) if needs_grad(leaf)]


def _run_backward(roots: list[Tensor], outputs: Any) -> None:
    wanted = [leaf for leaf in pytree.tree_leaves(outputs) if needs_grad(leaf)]
    if roots and wanted:
        # Not by autograd.grad: the hooks with which torch counts in modules do not allow it.
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.backward(roots, ones, inputs=wanted)
    for leaf in wanted:
        leaf.grad = None

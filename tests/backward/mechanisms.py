"""The two ways to split a backward, and plain autograd, behind one face for tests."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.backward import (
    SplitEngine,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

InputGrads: TypeAlias = Sequence[Tensor | None]
Halves: TypeAlias = tuple[InputGrads, Callable[[], object]]


def leaves_of(value: Any) -> Iterator[Any]:
    """What is in nested tuples, lists and dicts, in order."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


class AbstractPass(ABC):
    """One microbatch: `outputs` of its forward, and its backward.

    Gradients of inputs come in the order of the tensors in the arguments.
    `grads` mirrors the outputs, with None for all that gets no gradient; None for the whole
    means that the loss is `loss_of` the outputs.
    """

    outputs: Any

    @abstractmethod
    def backward(self, grads: Any) -> InputGrads:
        """The full backward."""

    @abstractmethod
    def backward_input(self, grads: Any) -> Halves:
        """The input half, and the weight half to be called later."""

    @abstractmethod
    def backward_input_of(self, loss: Tensor) -> Halves:
        """The same, from a loss that was computed from the outputs."""


class AutogradPass(AbstractPass):
    """Plain autograd, all of which runs in the input half."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs = tensors_of((args, kwargs))
        for x in self._inputs:
            if x.requires_grad:
                x.retain_grad()
        self.outputs = module(*args, **kwargs)

    def backward(self, grads: Any) -> InputGrads:
        if grads is None:
            return self.backward_input_of(loss_of(self.outputs))[0]
        pairs = zip(leaves_of(self.outputs), leaves_of(grads), strict=True)
        used = [(output, grad) for output, grad in pairs if grad is not None]
        torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])
        return [x.grad for x in self._inputs]

    def backward_input(self, grads: Any) -> Halves:
        return self.backward(grads), lambda: None

    def backward_input_of(self, loss: Tensor) -> Halves:
        loss.backward()
        return [x.grad for x in self._inputs], lambda: None


class FunctionsPass(AbstractPass):
    """`stage_backward`, `stage_backward_input` and `stage_backward_weight`."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._values = list(leaves_of((args, kwargs)))
        self.outputs = module(*args, **kwargs)

    def backward(self, grads: Any) -> InputGrads:
        outputs = loss_of(self.outputs) if grads is None else self.outputs
        return self._of_tensors(stage_backward(outputs, grads, self._values))

    def backward_input(self, grads: Any) -> Halves:
        if grads is None:
            return self.backward_input_of(loss_of(self.outputs))
        return self._halves(self.outputs, grads)

    def backward_input_of(self, loss: Tensor) -> Halves:
        return self._halves((loss,), None)

    def _halves(self, outputs: Any, grads: Any) -> Halves:
        params = self._module.parameters
        found, groups = stage_backward_input(outputs, grads, self._values, params())
        self.outputs = None
        return self._of_tensors(found), lambda: stage_backward_weight(params(), groups)

    def _of_tensors(self, found: InputGrads) -> InputGrads:
        pairs = list(zip(self._values, found, strict=True))
        assert all(grad is None for value, grad in pairs if not isinstance(value, Tensor))
        return [grad for value, grad in pairs if isinstance(value, Tensor)]


class EnginePass(AbstractPass):
    """A pass of a `SplitEngine`."""

    def __init__(self, engine: SplitEngine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pass = engine.forward(*args, **kwargs)
        self.outputs = self._pass.outputs

    def backward(self, grads: Any) -> InputGrads:
        if grads is None:
            return self._pass.backward(loss=loss_of(self.outputs))
        return self._pass.backward(grads)

    def backward_input(self, grads: Any) -> Halves:
        if grads is None:
            return self.backward_input_of(loss_of(self.outputs))
        self.outputs = None
        found, pending = self._pass.backward_input(grads)
        return found, pending.run

    def backward_input_of(self, loss: Tensor) -> Halves:
        self.outputs = None
        found, pending = self._pass.backward_input(loss=loss)
        return found, pending.run


def loss_of(outputs: Any) -> Tensor:
    """A loss of all outputs that require gradients, in which each element counts differently."""
    differentiable = [output for output in tensors_of(outputs) if output.requires_grad]
    losses = []
    for output in differentiable:
        factors = torch.linspace(-1, 2, output.numel(), dtype=output.real.dtype)
        losses.append((output * factors.view(output.shape)).abs().sum())
    return torch.stack([loss.double() for loss in losses]).sum()


def autograd(module: nn.Module) -> Callable[..., AbstractPass]:
    return lambda args, kwargs: AutogradPass(module, args, kwargs)


def functions(module: nn.Module) -> Callable[..., AbstractPass]:
    return lambda args, kwargs: FunctionsPass(module, args, kwargs)


def engine(module: nn.Module) -> Callable[..., AbstractPass]:
    prepared = SplitEngine(module)
    return lambda args, kwargs: EnginePass(prepared, args, kwargs)


MECHANISMS = [functions, engine]

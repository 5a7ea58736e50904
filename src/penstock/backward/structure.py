"""Pair nested stage outputs with their gradients, and check that they match."""

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from penstock.errors import BackwardError
from penstock.torch_private import pytree


def pair_with_grads(outputs: Any, grads: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output tensors that have a gradient to send back, and those gradients.

    `outputs` is a tensor or nests tuples, lists and dicts; `grads` mirrors it. A None in
    `grads` means that nobody used that output. The outputs are losses, each with a gradient of
    ones, if `grads` is None, or if it contains only None and every output is a scalar.
    """
    if type(outputs) is type(grads) is list and len(outputs) == len(grads) == 1:
        name, output, grad = "output[0]", outputs[0], grads[0]
    else:
        name, output, grad = "output", outputs, grads
    if type(output) is Tensor and type(grad) is Tensor and output.requires_grad:
        _check_grad(name, output, grad)  # The usual case, without the search.
        return [output], [grad]
    pairs = list(_pairs(outputs, grads, "output"))
    found = [pair for pair in pairs if pair[1].requires_grad]
    if not found:
        given = ", ".join(f"{name} {describe(out)}" for name, out, _ in pairs) or "no tensor"
        raise BackwardError(
            f"no stage output requires a gradient (got {given}), so there is nothing to run "
            "backward. Expected at least one output computed from an input or parameter with "
            "requires_grad=True, outside of torch.no_grad()."
        )
    roots: list[Tensor] = []
    root_grads: list[Tensor] = []
    are_losses = grads is None or all(
        grad is None and output.numel() == 1 for _, output, grad in found
    )
    for name, output, grad in found:
        if are_losses:
            if output.is_complex():
                raise BackwardError(
                    f"the loss is {name} {describe(output)}, a complex number. Expected a real "
                    "one: take its absolute value, or its real part."
                )
            grad = torch.ones_like(output)
        if grad is not None:
            _check_grad(name, output, grad)
            roots.append(output)
            root_grads.append(grad)
    return roots, root_grads


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors of a nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for _, tensor, _ in _pairs(value, None, "value")]


def differentiable(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among the values that require gradients, each once."""
    found = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    return found if len(found) < 2 else list(dict.fromkeys(found))


def spread_over(
    values: Sequence[Any], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each value that is one of the inputs, and None for the others."""
    if len(values) == len(inputs) == 1:
        return (grads[0],)
    grad_of = dict(zip(inputs, grads, strict=True))
    return tuple(grad_of.get(value) if isinstance(value, Tensor) else None for value in values)


def describe(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} and {tensor.dtype}"


def _pairs(output: Any, grad: Any, name: str) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield every tensor of a nested output with its name and gradient (None if absent)."""
    if isinstance(output, Tensor):
        yield name, output, grad
    elif isinstance(output, tuple | list):
        if grad is not None:
            _check_container(name, grad, (tuple, list), len(output), f"{len(output)} gradients")
        for i, item in enumerate(output):
            yield from _pairs(item, None if grad is None else grad[i], f"{name}[{i}]")
    elif isinstance(output, dict):
        if grad is not None:
            wanted = f"a dict with the keys {sorted(map(str, output))}"
            _check_container(name, grad, (dict,), len(output), wanted)
            if grad.keys() != output.keys():
                raise _mismatch(name, f"keys {sorted(map(str, grad))}", wanted)
        for key, item in output.items():
            yield from _pairs(item, None if grad is None else grad[key], f"{name}[{key!r}]")
    elif type(output) in pytree.SUPPORTED_NODES:  # A container class that the user registered.
        flatten = pytree.SUPPORTED_NODES[type(output)].flatten_fn
        grads = None if grad is None else flatten(grad)[0]
        yield from _pairs(flatten(output)[0], grads, name)


def _check_container(
    name: str, grad: Any, kinds: tuple[type[Sized], ...], length: int, wanted: str
) -> None:
    if not isinstance(grad, kinds):
        raise _mismatch(name, f"a {type(grad).__name__}", wanted)
    if len(grad) != length:
        raise _mismatch(name, f"{len(grad)} gradients", wanted)


def _check_grad(name: str, output: Tensor, grad: Any) -> None:
    if not isinstance(grad, Tensor):
        raise _mismatch(name, f"a {type(grad).__name__}", "a tensor or None")
    is_other_kind = grad.dtype is not output.dtype and grad.is_complex() != output.is_complex()
    if grad.shape != output.shape or is_other_kind:
        raise _mismatch(name, f"a gradient {describe(grad)}", f"one {describe(output)}")


def _mismatch(name: str, got: str, wanted: str) -> BackwardError:
    return BackwardError(
        f"output_grads does not match the stage output: for {name} it holds {got}; expected "
        f"{wanted}. Give each output its gradient, or None for an output that nobody used."
    )

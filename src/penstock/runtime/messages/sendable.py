"""Tensors that can be sent: those whose memory holds everything about them.

A link copies memory, and the receiver makes a plain tensor from it. Any other tensor would crash
the process (no memory to read), or arrive as something else (a subclass, a layout, a scale).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.comm.collective_results import waited
from penstock.errors import StageError
from penstock.torch_private import (
    FakeTensor,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
)

_PLAIN_TYPES = (Tensor, nn.Parameter)
"""The classes of tensors whose memory holds everything about them."""


class Fault(NamedTuple):
    """The reason why a tensor cannot be sent."""

    what: str
    """The end of the sentence "it is ..."."""
    remedy: str
    """The change to make in the stage that returns it."""


def as_sent(
    tensor: Tensor,
    device: torch.device,
    place: str,
    number: int | None = None,
    *,
    is_dry: bool = False,
) -> Tensor:
    """Return the values of a tensor as they are sent: everything sent goes through here.

    Raise an error if the tensor cannot be sent from a stage on `device`. `place` names it, and
    `number` says which of several it is. If `is_dry`, nothing is sent, and a tensor may be without
    values.
    """
    tensor = waited(tensor)
    if is_dry and type(tensor) is FakeTensor:
        return tensor.detach().contiguous()
    if (fault := find_fault(tensor, device)) is not None:
        which = place if number is None else f"{place} {number}"
        raise StageError(
            f"{which} is {fault.what}, which cannot be sent to another rank. Expected a plain, "
            f"dense tensor with values on {device}: {fault.remedy}."
        )
    values = tensor.detach()
    if values.is_contiguous() and not values.is_conj() and not values.is_neg():
        return values
    return values.resolve_conj().resolve_neg().contiguous()


def is_memory_alone(tensor: Tensor, device: torch.device, *, is_complex: bool) -> bool:
    """Return whether a tensor of class Tensor is certainly the contiguous memory that it looks.

    If so, `as_sent` would return its values as they are. For a tensor that is not quantised.
    """
    try:
        # Other layouts have no address, and raise an error.
        return (
            (tensor.device == device or _is_on(device, tensor.device))
            and not tensor.is_nested
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not (is_complex and tensor.is_conj())
            and tensor.data_ptr() != 0
            and tensor.storage_offset() == 0
            and tensor.nbytes <= tensor.untyped_storage().nbytes()
        )
    except RuntimeError:  # Also raised for a tensor that a transform of torch.func has wrapped.
        return False


def find_fault(tensor: Tensor, device: torch.device) -> Fault | None:
    """Return why `tensor` cannot be sent from a stage on `device`; None if it can.

    This takes about a microsecond if nothing is wrong, so every tensor can be checked.
    """
    if (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and (tensor.device == device or _is_on(device, tensor.device))
        and not tensor.is_nested
        and not tensor.is_quantized
    ):
        return None if _has_memory(tensor) else _explain_memory(tensor)
    return _explain(tensor, device)


def check_mode(device: torch.device) -> None:
    """Raise an error if torch does not make plain tensors, so that nothing can be received."""
    made = type(torch.empty(0, device=device))
    if made is not Tensor:
        raise StageError(
            f"a step was started where torch makes every new tensor a {made.__name__}, so "
            "nothing can be received. Expected plain tensors: leave the mode, such as "
            "FakeTensorMode, before the step."
        )


def _is_on(device: torch.device, found: torch.device) -> bool:
    """Return whether `found` is `device`, which stands for any of its type without an index."""
    return found.type == device.type and (device.index is None or found.index is None)


def _has_memory(tensor: Tensor) -> bool:
    """Return whether the tensor has memory for all of its values."""
    end = tensor.nbytes
    if end == 0:
        return True
    try:
        if tensor.data_ptr() == 0:
            return False
    except RuntimeError:  # Raised for a tensor that a transform of torch.func has wrapped.
        return False
    if not tensor.is_contiguous():
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        end = (1 + sum((size - 1) * step for size, step in strides)) * tensor.itemsize
    if (offset := int(tensor.storage_offset())) > 0:
        end += offset * tensor.itemsize
    return end <= tensor.untyped_storage().nbytes()


def _explain_memory(tensor: Tensor) -> Fault:
    if tensor.is_meta:
        return Fault("on meta and has no values", "compute it on a device that has memory")
    if is_functorch_wrapped_tensor(tensor):
        return Fault(
            "a tensor inside a transform of torch.func (vmap, grad)",
            "return what the transform returns, not what it computes with",
        )
    if is_functional_tensor(tensor):
        return Fault("a functional tensor, as tracing makes them", "run the stage, do not trace it")
    return Fault(
        "a tensor whose memory has been freed (its storage has been resized)",
        "return a tensor that has its values, or a clone() made before they were freed",
    )


def _explain(tensor: Tensor, device: torch.device) -> Fault:
    kind = type(tensor)
    if tensor.is_nested:
        name = kind.__name__ if kind is not Tensor else f"nested tensor of layout {tensor.layout}"
        return Fault(f"a {name}", "return its values and offsets, or a padded tensor")
    if kind.__name__ == "DTensor":
        return Fault("a DTensor", "return its local part, to_local(), or all of it, full_tensor()")
    if kind not in _PLAIN_TYPES:
        return Fault(
            f"of class {kind.__module__}.{kind.__qualname__}, a subclass of Tensor",
            "return plain tensors: those that it consists of, or its as_subclass(torch.Tensor)",
        )
    if tensor.layout is not torch.strided:
        return Fault(f"of layout {tensor.layout} on {tensor.device}", "return its to_dense()")
    if tensor.is_quantized:
        return Fault(f"quantised, of {tensor.dtype}", "return its dequantize() or int_repr()")
    if tensor.is_meta:
        return _explain_memory(tensor)
    return Fault(f"on {tensor.device}", f"return its to({str(device)!r})")

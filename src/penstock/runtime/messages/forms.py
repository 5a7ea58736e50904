"""Forms of messages, which both ends know after the first step.

A message is the value that one stage makes for another, for one microbatch. Its *form* is
everything about it except the values of its tensors. In the first step, and always with dynamic
shapes, the form is sent before the message. Later both ends know it: the receiver can post its
buffers ahead, and the sender checks each message against it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from penstock.comm.plain_values import to_bytes
from penstock.errors import PipeliningShapeError, StageError
from penstock.runtime.messages.packing import Packing
from penstock.runtime.messages.sendable import is_memory_alone
from penstock.stage.dtensors import Spread, local_part
from penstock.stage.examples import check_alike, check_spread, check_tensor
from penstock.torch_private import FakeTensor, pytree


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Everything about a tensor except its values."""

    shape: torch.Size
    """The shape of what travels: of a DTensor, the local part."""
    dtype: torch.dtype
    requires_grad: bool
    spread: Spread | None = field(default=None, repr=False)
    """For a DTensor, how it is spread over a mesh."""

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorForm":
        spread = Spread.of(tensor)
        if spread is not None and (odd := spread.untold_placement) is not None:
            raise StageError(
                f"a DTensor of shape {tuple(tensor.shape)} has the placement {odd}, which holds "
                "values of its own and cannot be sent to another rank. Expected Shard, Replicate "
                "or Partial: redistribute it first, as with RowwiseParallel(output_layouts=...)."
            )
        shape = tensor.shape if spread is None else local_part(tensor).shape
        return cls(shape, tensor.dtype, tensor.requires_grad, spread)

    def empty(self, device: torch.device) -> Tensor:
        # Named: torch takes twice as long to parse a size that is given by its place.
        return torch.empty(size=self.shape, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Form:
    """Everything about a message except the values of its tensors; other leaves are kept."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    tensors: tuple[TensorForm, ...] = field(init=False, repr=False, compare=False)
    are_plain: bool = field(init=False, repr=False, compare=False)
    """True if all leaves are plain tensors, the arguments of a stage one by one."""
    need_grads: bool = field(init=False, repr=False, compare=False)
    """True if all tensors need a gradient."""
    packing: Packing | None = field(init=False, repr=False, compare=False)
    """The tensors that travel together on links where that pays."""

    def __post_init__(self) -> None:
        tensors = tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorForm))
        is_flat = self.structure is _plain_tuple(len(self.leaves))
        are_plain = len(tensors) == len(self.leaves) and all(t.spread is None for t in tensors)
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "are_plain", is_flat and are_plain)
        object.__setattr__(self, "need_grads", all(t.requires_grad for t in tensors))
        packing = Packing.of([(t.shape, t.dtype) for t in tensors])
        object.__setattr__(self, "packing", packing)

    @classmethod
    def of(cls, leaves: list[Any], structure: pytree.TreeSpec) -> "Form":
        forms = (TensorForm.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(structure, tuple(forms))

    @classmethod
    def of_tree(cls, tree: Any) -> "Form":
        """Return the form with the leaves of `tree`, in which TensorForms stand for tensors."""
        leaves, structure = flatten(tree)
        return cls(structure, tuple(leaves))

    def as_tree(self) -> Any:
        """Return what `of_tree` takes; unlike the structure by itself, it can be sent."""
        return unflatten(self.leaves, self.structure)

    def values_of(
        self, leaves: list[Any], structure: pytree.TreeSpec, device: torch.device
    ) -> list[Tensor] | None:
        """Return what to send for a message that certainly has this form and can be sent as it is.

        Return None if that is not certain: `as_sent` and `check` then decide, one leaf at a time.
        """
        if structure is not self.structure or not self.are_plain:
            return None
        values = []
        for leaf, form in zip(leaves, self.tensors, strict=True):
            if (
                type(leaf) is not Tensor
                or leaf.dtype is not form.dtype  # A quantised tensor has a dtype of its own.
                or leaf.requires_grad is not form.requires_grad
                or not is_memory_alone(leaf, device, is_complex=form.dtype.is_complex)
                or leaf.shape != form.shape
            ):
                return None
            # Without its graph, which would live as long as the transfer.
            values.append(leaf.detach() if form.requires_grad else leaf)
        return values

    def check(
        self, place: str, leaves: list[Any], structure: pytree.TreeSpec, *, is_gradient: bool
    ) -> None:
        """Raise an error at `place` if a message does not have this form.

        Tensors of a gradient may be missing: zeros are sent.
        """
        if structure is not self.structure and structure != self.structure:
            raise PipeliningShapeError(
                f"{place}: structure mismatch: expected {self.structure}, got {structure}. "
                "Let the stage return the same structure for every microbatch, or make the "
                "stages with dynamic_shapes=True."
            )
        for number, (form, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if not isinstance(form, TensorForm) or not isinstance(leaf, Tensor):
                is_missing = leaf is None and is_gradient
                if not is_missing and not _are_same(form, leaf):
                    raise _changed(f"{place} {number}", "value", form, leaf)
            elif (spread := Spread.of(leaf)) != form.spread:
                check_spread(f"{place} {number}", form.spread, spread, _KEEP_FORM)
            elif (local := local_part(leaf)).shape != form.shape or leaf.dtype != form.dtype:
                check_tensor(f"{place} {number}", form, local, _KEEP_FORM)
            elif leaf.requires_grad != form.requires_grad:
                raise _changed(
                    f"{place} {number}", "requires_grad", form.requires_grad, leaf.requires_grad
                )

    def as_arguments(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        """Return the arguments of the stage that receives this message, with these tensors."""
        if self.are_plain:
            return tuple(tensors)
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        return unflatten(leaves, self.structure)

    def check_alike(self, place: str, other: "Form") -> None:
        """Raise an error at `place` if `other`, of another microbatch, is spread differently."""
        if self.structure != other.structure:
            return
        for number, (form, found) in enumerate(zip(self.leaves, other.leaves, strict=True)):
            if isinstance(form, TensorForm) and isinstance(found, TensorForm):
                check_alike(f"{place} {number}", form.spread, found.spread, _KEEP_FORM)


def flatten(arguments: tuple[Any, ...]) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of nested arguments, and the structure that they are nested in."""
    if len(arguments) == 1 and type(arguments[0]) is Tensor:  # As nearly all messages are.
        return [arguments[0]], _ONE
    # For plain tuples, torch's function takes ten times as long.
    if _LEAF_TYPES.issuperset(map(type, arguments)):
        return list(arguments), _plain_tuple(len(arguments))
    # torch takes a torch.Size apart, and would restore it as a plain tuple.
    return pytree.tree_flatten(arguments, lambda value: isinstance(value, torch.Size))


def unflatten(leaves: Sequence[Any], structure: pytree.TreeSpec) -> tuple[Any, ...]:
    """Return the arguments that `flatten` took apart, with these leaves."""
    if structure is _ONE or structure is _plain_tuple(len(leaves)):
        return tuple(leaves)
    arguments: tuple[Any, ...] = pytree.tree_unflatten(leaves, structure)
    return arguments


_KEEP_FORM = "Keep it the same in all steps, or make the stages with dynamic_shapes=True."
_LEAF_TYPES = frozenset((Tensor, FakeTensor, TensorForm, NoneType))


@cache
def _plain_tuple(length: int) -> pytree.TreeSpec:
    return pytree.tree_structure((None,) * length)


_ONE = _plain_tuple(1)


def _are_same(first: Any, second: Any) -> bool:
    """Return whether two values other than tensors are equal; `==` fails for arrays and NaN."""
    if first is second or type(first) is not type(second):
        return first is second
    return to_bytes(first) == to_bytes(second)


def _changed(place: str, what: str, expected: Any, got: Any) -> PipeliningShapeError:
    if isinstance(got, Tensor):
        got = TensorForm.of(got)
    return PipeliningShapeError(
        f"{place}: {what} mismatch: expected {expected!r} as in the first step, got {got!r}. "
        f"{_KEEP_FORM}"
    )

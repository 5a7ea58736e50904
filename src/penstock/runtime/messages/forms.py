"""What travels between stages: tensors, and in the first step what they are like.

A message is what one stage hands to the next for one microbatch. Its *form* is all of it but the
values of its tensors. In the first step, or always with dynamic shapes, a message is preceded by
its form; later both ends know it, the receiver can post its buffers ahead, and the sender checks
what it sends against it.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipeliningShapeError
from penstock.stage.examples import check_tensor
from penstock.torch_private import REGISTER_PYTREE_NODE, pytree


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor but for its values."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorForm":
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Form:
    """A message but for the values of its tensors; leaves that are no tensors are as they are."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, leaves: list[Any], structure: pytree.TreeSpec) -> "Form":
        forms = (TensorForm.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(structure, tuple(forms))

    @classmethod
    def of_tree(cls, tree: Any) -> "Form":
        """The form whose leaves are those of `tree`, which holds TensorForms for tensors."""
        leaves, structure = flatten(tree)
        return cls(structure, tuple(leaves))

    def as_tree(self) -> Any:
        """What `of_tree` takes; unlike the structure by itself, it can be pickled."""
        return unflatten(self.leaves, self.structure)

    @property
    def tensors(self) -> list[TensorForm]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def check(self, place: str, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        """Raises if a message has not this form; says where."""
        if structure is not self.structure and structure != self.structure:
            raise PipeliningShapeError(
                f"{place}: structure mismatch: expected {self.structure}, got {structure}. "
                "Let the stage return the same structure for every microbatch, or make the "
                "stages with dynamic_shapes=True."
            )
        for number, (form, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if not isinstance(form, TensorForm) or not isinstance(leaf, Tensor):
                if not _are_same(form, leaf):
                    raise _changed(f"{place} {number}", "value", form, leaf)
            elif leaf.shape != form.shape or leaf.dtype != form.dtype:
                check_tensor(f"{place} {number}", form, leaf, _KEEP_FORM)
            elif leaf.requires_grad != form.requires_grad:
                raise _changed(
                    f"{place} {number}", "requires_grad", form.requires_grad, leaf.requires_grad
                )

    def filled(self, leaves: list[Any], device: torch.device) -> list[Any]:
        """The leaves of a gradient, with zeros where there is none but the receiver expects one."""
        if all(leaf is not None for leaf in leaves):
            return leaves
        return [
            torch.zeros(form.shape, dtype=form.dtype, device=device)
            if leaf is None and isinstance(form, TensorForm)
            else leaf
            for form, leaf in zip(self.leaves, leaves, strict=True)
        ]

    def as_arguments(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        """The arguments of the stage that receives this message, with these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        return unflatten(leaves, self.structure)


def pickle_form(form: Form) -> bytes:
    """The form for another process, which `Form.of_tree` and pickle.loads make of it again."""
    file = io.BytesIO()
    _FormPickler(file).dump(form.as_tree())
    return file.getvalue()


class _FormPickler(pickle.Pickler):
    """Refuses tensors: one that pytree did not find would lose its gradient on the way."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise TypeError(
                "it has a tensor in an object that torch cannot look into; register its class "
                f"with {REGISTER_PYTREE_NODE}, or return tuples or dicts"
            )
        return NotImplemented


def flatten(arguments: tuple[Any, ...]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of nested arguments, and what puts them together again."""
    # Nearly all messages are plain tuples, for which torch's general way takes ten times as long.
    if all(type(argument) in _LEAF_TYPES for argument in arguments):
        return list(arguments), _plain_tuple(len(arguments))
    # torch takes a shape apart, and puts together a plain tuple.
    return pytree.tree_flatten(arguments, lambda value: isinstance(value, torch.Size))


def unflatten(leaves: Sequence[Any], structure: pytree.TreeSpec) -> tuple[Any, ...]:
    """The arguments that `flatten` took apart, with these leaves."""
    if structure is _plain_tuple(len(leaves)):
        return tuple(leaves)
    arguments: tuple[Any, ...] = pytree.tree_unflatten(leaves, structure)
    return arguments


_KEEP_FORM = "Keep it the same in all steps, or make the stages with dynamic_shapes=True."
_LEAF_TYPES = (Tensor, TensorForm, NoneType)


@cache
def _plain_tuple(length: int) -> pytree.TreeSpec:
    return pytree.tree_structure((None,) * length)


def _are_same(first: Any, second: Any) -> bool:
    """Whether two values that are no tensors are equal; arrays and NaN do not tell by `==`."""
    if first is second or type(first) is not type(second):
        return first is second
    return pickle.dumps(first) == pickle.dumps(second)


def _changed(place: str, what: str, expected: Any, got: Any) -> PipeliningShapeError:
    if isinstance(got, Tensor):
        got = TensorForm.of(got)
    return PipeliningShapeError(
        f"{place}: {what} mismatch: expected {expected!r} as in the first step, got {got!r}. "
        f"{_KEEP_FORM}"
    )

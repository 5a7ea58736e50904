"""Tensors of other stages: they have forms, but no values.

A stage that runs the whole model's forward meets values that other stages compute. A hollow tensor
stands for each. What is computed from it is hollow too, on the meta device, so it takes no memory.
What would need its values is refused: a wrong value cannot slip through. Once the stage has
received the value, the hollow tensor is *filled*, and acts as that value.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from penstock.errors import StageError
from penstock.torch_private import pytree

_META = torch.device("meta")
# These make tensors of known values, whatever the values of the tensor are that they are like.
_MADE: dict[str, Callable[..., Tensor]] = {
    "zeros_like": torch.zeros,
    "ones_like": torch.ones,
    "empty_like": torch.empty,
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
    "new_empty": torch.empty,
}
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__")


class Whereabouts:
    """The device that a stage is on, which its hollow tensors pretend to be on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Hollow(Tensor):
    """A tensor that stands for a value of another stage."""

    form: Tensor
    """The same on the meta device, as a plain tensor."""
    origin: str
    """The module or parameter that the value comes from."""
    whereabouts: Whereabouts
    filled: Tensor | None
    """The value, once it has been received."""

    @staticmethod
    def like(tensor: Tensor, origin: str, whereabouts: Whereabouts) -> "Hollow":
        """Return a hollow tensor with the form of another."""
        form = _form_of(tensor)
        hollow: Hollow = form.view_as(form).as_subclass(Hollow)
        hollow.form, hollow.origin, hollow.whereabouts = form, origin, whereabouts
        hollow.filled = None
        return hollow

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given: dict[str, Any]
        args, given = fill((args, dict(kwargs or {})))
        empty = next(hollow_leaves((args, given)), None)
        if empty is None:
            return func(*args, **given)
        name = func.__name__
        if name == "__get__":
            return _attribute(func, empty)
        if _writes(name, args, given) and not isinstance(args[0], Hollow):
            raise _refusal(empty, name)
        try:
            result = func(*_bare(args), **_bare(given))
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as exc:
            raise _refusal(empty, name) from exc
        if _writes(name, args, given):
            return args[0] if isinstance(result, Tensor) else result
        if name in _MADE and isinstance(result, Tensor):
            device = given.get("device") or empty.whereabouts.device
            return _MADE[name](result.shape, dtype=result.dtype, device=device)

        def wrap(value: Tensor) -> Tensor:
            return Hollow.like(value, empty.origin, empty.whereabouts)

        return pytree.tree_map_only(Tensor, wrap, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hollow":
        whereabouts = deepcopy(self.whereabouts, memo)
        copied = Hollow.like(self.form, self.origin, whereabouts)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        form = self.form
        return f"Hollow({self.origin}, {form.dtype}, {list(form.shape)})"


def hollow_leaves(tree: Any) -> Iterator[Hollow]:
    """Yield the hollow tensors in a tree that were not filled."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Hollow) and leaf.filled is None:
            yield leaf


def fill(tree: Any) -> Any:
    """Return a tree with values for filled hollow tensors; dicts and lists are changed in place.

    A module may keep a dict that it is given, and put values for later modules there.
    """
    if isinstance(tree, Hollow):
        return tree if tree.filled is None else tree.filled
    if type(tree) is dict:
        for key, value in tree.items():
            if not isinstance(value, str | int | float | None):
                tree[key] = fill(value)
        return tree
    if type(tree) is list:
        tree[:] = [fill(value) for value in tree]
        return tree
    if type(tree) is tuple:
        return tuple(fill(value) for value in tree)
    if isinstance(tree, Tensor) or pytree.tree_is_leaf(tree):
        return tree
    if any(isinstance(leaf, Hollow) for leaf in pytree.tree_leaves(tree)):
        return pytree.tree_map_only(Hollow, fill, tree)
    return tree


def _attribute(func: Any, hollow: Hollow) -> Any:
    """Return an attribute of a tensor, such as its shape or its device."""
    name = getattr(func.__self__, "__name__", "")
    device = hollow.whereabouts.device
    if name == "device":
        return device
    if name.startswith("is_") and name.removeprefix("is_") in {*_device_types(), "meta"}:
        return device.type == name.removeprefix("is_")
    result = func(hollow.form)
    if isinstance(result, Tensor):
        return Hollow.like(result, hollow.origin, hollow.whereabouts)
    return result


def _device_types() -> set[str]:
    """Return the types of devices that code may name."""
    accelerator = torch.accelerator.current_accelerator()
    known = {"cpu", "cuda", "mps", "xpu"}
    return known if accelerator is None else {*known, accelerator.type}


def _writes(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Return whether a function changes its first argument, or another tensor."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    return bool(args) and (is_in_place or name in _IN_PLACE or given.get("out") is not None)


def _bare(tree: Any) -> Any:
    """Return the arguments of a function for the meta device."""

    def bare(leaf: Any) -> Any:
        if isinstance(leaf, Hollow):
            return leaf.form
        if isinstance(leaf, Tensor):
            return _form_of(leaf)
        if isinstance(leaf, torch.device):
            return _META
        if isinstance(leaf, str) and leaf.partition(":")[0] in _device_types():
            return "meta"
        return leaf

    return pytree.tree_map(bare, tree)


def _form_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Hollow):
        return tensor.form
    if tensor.is_meta:
        return tensor.detach()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _refusal(hollow: Hollow, name: str) -> StageError:
    return StageError(
        f"{name} needs the values of {hollow.origin}, which another stage computes, in a place "
        "where they do not arrive: values travel only as arguments of layers and as outputs of the "
        "model. Cut the model elsewhere, or let the code be part of a layer."
    )

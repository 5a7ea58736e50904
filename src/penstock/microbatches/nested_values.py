"""The parts of nested values, and their names in error messages."""

from reprlib import repr as short_repr
from typing import Any

from torch import Tensor

from penstock.errors import MicrobatchError
from penstock.microbatches.masks import is_one_leaf
from penstock.torch_private import pytree


def require(is_right: bool, name: str, value: Any, expected: str) -> None:
    if not is_right:
        raise MicrobatchError(f"{name} is {in_words(value)}; expected {expected}.")


def is_leaf(value: Any) -> bool:
    return is_one_leaf(value) or pytree.tree_is_leaf(value)


def parts_of(value: Any) -> dict[str, Any] | None:
    """Return the parts of a container, by names such as `[0]`; None if it is not a container."""
    if is_leaf(value):
        return None

    def is_part(node: Any) -> bool:
        return node is not value

    try:
        paths, _ = pytree.tree_flatten_with_path(value, is_part)
    except ValueError:  # This type was registered without names for its parts.
        return {f"[{i}]": part for i, part in enumerate(pytree.tree_leaves(value, is_part))}
    return {pytree.keystr(path): part for path, part in paths}


def leaf_names(value: Any) -> list[str]:
    """Return the text after the name of `value` for each of its leaves, such as `[0]`."""
    parts = parts_of(value)
    if parts is None:
        return [""]
    return [key + name for key, part in parts.items() for name in leaf_names(part)]


def in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    if is_one_leaf(value):
        return f"a {type(value).__name__}"
    if pytree.tree_is_leaf(value):
        return short_repr(value)
    return f"a {type(value).__name__} with {', '.join(leaf_names(value)) or 'nothing in it'}"

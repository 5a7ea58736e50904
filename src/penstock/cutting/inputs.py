"""The arguments that a model was traced with, and those that its graph takes."""

import inspect
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from penstock.errors import PipeliningShapeError, StageError
from penstock.ir import StageId
from penstock.stage.examples import check_tensor
from penstock.torch_private import pytree

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Inputs:
    """The arguments of a traced model: their names, how they are nested, and their forms.

    Calls may give by keyword what was traced by position, and the reverse. The forms are shapes,
    dtypes and values other than tensors. The graph holds for those of the trace, and for others
    that were added because they give the same graph.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.names = list(names)
        """The names of the graph's placeholders, one for each tensor or other value."""
        examples, self.structure = pytree.tree_flatten((args, kwargs))
        self._forms = [_forms(examples)]
        self._num_args, self._keys = len(args), list(kwargs)
        # Not the model itself, which a stage must not keep.
        self._parameters = _positional_parameters(model)
        self._keywords = {*self._keys, *self._parameters[: self._num_args]}

    def take(self, args: tuple[Any, ...], given: dict[str, Any]) -> list[Any]:
        """Return the values of the graph's placeholders in a call."""
        leaves = self.flatten(args, given)
        self._check(leaves)
        return leaves

    def flatten(self, args: tuple[Any, ...], given: dict[str, Any]) -> list[Any]:
        """Return the values of the placeholders in a call, whatever their forms are."""
        bound = self._bind(args, given)
        try:
            leaves: list[Any] = self.structure.flatten_up_to(bound)
        except ValueError as exc:
            raise StageError(
                f"the arguments of the model are not nested like those that it was traced with: "
                f"{exc}. Expected {self.structure}."
            ) from exc
        return leaves

    def check_keywords(self, stage: StageId, given: Iterable[str]) -> None:
        """Raise an error if a later stage is given a keyword argument that no stage takes."""
        unknown = [key for key in given if key not in self._keywords]
        if unknown:
            raise StageError(
                f"stage {stage} was given the keyword arguments {_listed(unknown)}, which no stage "
                f"takes: the model was traced with {_call(self._num_args, self._keys)}. Leave them "
                "out, or trace the model with them."
            )

    def in_order(
        self, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let positions beyond those of the trace stand for its keywords, in their order.

        torch's pipes bind so, although the model's own forward may have other parameters there.
        """
        moved = dict(zip(self._keys, args[self._num_args :], strict=False))
        if len(moved) < len(args) - self._num_args or not moved.keys().isdisjoint(given):
            return args, given  # Refused later.
        return args[: self._num_args], {**moved, **given}

    @property
    def traced_forms(self) -> Sequence[Any]:
        """The forms of the trace."""
        return self._forms[0]

    def difference(self, forms: Sequence[Any], leaves: Sequence[Any]) -> str:
        """Describe how these values differ from the forms; empty if they do not."""
        try:
            self._check_against(forms, leaves)
        except (PipeliningShapeError, StageError) as exc:
            return str(exc).partition(". ")[0]
        return ""

    def add_forms(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Take values of these forms from now on, as they give the same graph; return the forms."""
        self._forms.append(_forms(leaves))
        return self._forms[-1]

    def _bind(
        self, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they were traced: by position or by keyword."""
        own, rest = list(args[: self._num_args]), dict(given)
        for name in self._parameters[len(own) : self._num_args]:
            if name in rest:
                own.append(rest.pop(name))
        moved = self._parameters[self._num_args : len(args)]
        rest.update(dict(zip(moved, args[self._num_args :], strict=False)))
        is_lost = len(args) > self._num_args + len(moved) or not given.keys().isdisjoint(moved)
        if is_lost or len(own) != self._num_args or rest.keys() != set(self._keys):
            raise StageError(
                f"the model was traced with {_call(self._num_args, self._keys)}, but called with "
                f"{_call(len(args), given)}. Call it with arguments like those that it was traced "
                "with, on the rank of its first stage."
            )
        return tuple(own), {key: rest[key] for key in self._keys}

    def _check(self, leaves: Sequence[Any]) -> None:
        """Raise an error if the graph is not known to hold for values of these forms."""
        first, *others = self._forms
        try:
            self._check_against(first, leaves)
        except (PipeliningShapeError, StageError):
            for forms in others:
                try:
                    return self._check_against(forms, leaves)
                except (PipeliningShapeError, StageError):
                    continue
            raise

    def _check_against(self, forms: Sequence[Any], leaves: Sequence[Any]) -> None:
        for name, expected, leaf in zip(self.names, forms, leaves, strict=True):
            _check_input(name, expected, leaf)


def _forms(leaves: Iterable[Any]) -> list[Any]:
    return [x.detach().to("meta") if isinstance(x, Tensor) else x for x in leaves]


def _positional_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that the model's forward takes by position."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    leading = takewhile(lambda parameter: parameter.kind in _BY_POSITION, parameters)
    # One that has no name to call it by keeps its place, under a name that is not one.
    return [p.name if p.kind is p.POSITIONAL_OR_KEYWORD else f"{p.name}/" for p in leading]


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"{key}=" for key in keys)


def _call(num_args: int, keys: Iterable[str]) -> str:
    """Describe the arguments of a call."""
    return ", ".join([f"{num_args} positional arguments", *(f"{key}=" for key in keys)])


def _is_same(expected: Any, leaf: Any) -> bool:
    """Return whether a model does the same for both: 1, 1.0 and True are different, nan is not."""
    is_nan = expected != expected and leaf != leaf
    return type(expected) is type(leaf) and (is_nan or bool(expected == leaf))


def _check_input(name: str, expected: Any, leaf: Any) -> None:
    if isinstance(expected, Tensor) and isinstance(leaf, Tensor):
        remedy = "Trace the model with an example of one microbatch as it comes in a step."
        check_tensor(f"input {name}", expected, leaf, remedy)
    elif isinstance(expected, Tensor) or isinstance(leaf, Tensor) or not _is_same(expected, leaf):
        raise StageError(
            f"input {name} is {_brief(leaf)}, but the model was traced with {_brief(expected)}, "
            "on which its graph may depend. Give it the same, or trace the model again."
        )


def _brief(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)

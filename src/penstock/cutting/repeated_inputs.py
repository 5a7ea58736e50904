"""The model's inputs, which every stage of an untraced cut takes by keyword."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from penstock.errors import StageError
from penstock.ir import StageId
from penstock.stage.examples import check_tensor
from penstock.torch_private import pytree


class RepeatedInputs:
    """The model's inputs by keyword, and the forms that they have in the example."""

    def __init__(self, kwargs: dict[str, Any], written: Collection[str] = ()) -> None:
        """Store the forms of an example; the forward changes `written` in place."""
        self._written = frozenset(written)
        self._forms = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta"), kwargs)

    def take(self, stage: StageId, given: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of one forward: other stages may use the same tensors."""
        self.check(stage, given)
        for name in self._written:
            given[name] = pytree.tree_map_only(Tensor, Tensor.clone, given[name])
        return given

    def check(self, stage: StageId, given: Mapping[str, Any]) -> None:
        """Raise an error if these are not like the example's."""
        if given.keys() != self._forms.keys():
            raise StageError(
                f"stage {stage} was given the inputs {_listed(given)}. Expected "
                f"{_listed(self._forms)}, as in the example that the model was cut with: give them "
                "to step() by keyword, on every rank."
            )
        for name in given:
            expected, structure = pytree.tree_flatten(self._forms[name])
            actual, own_structure = pytree.tree_flatten(given[name])
            if structure != own_structure:
                raise _other_value(stage, name, "is nested differently")
            for form, leaf in zip(expected, actual, strict=True):
                self._check_leaf(stage, name, form, leaf)

    def _check_leaf(self, stage: StageId, name: str, form: Any, leaf: Any) -> None:
        if isinstance(form, Tensor) and isinstance(leaf, Tensor):
            remedy = "Cut the model with an example of one microbatch as it comes in a step."
            check_tensor(f"stage {stage}: input {name}", form, leaf, remedy)
        elif isinstance(form, Tensor) or isinstance(leaf, Tensor) or form != leaf:
            raise _other_value(stage, name, f"is {leaf!r}, not {form!r}")


def _listed(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}=" for key in keys) or "nothing"


def _other_value(stage: StageId, name: str, what: str) -> StageError:
    return StageError(
        f"stage {stage}: input {name} {what}. Expected inputs as in the example that the model was "
        "cut with. Give it the same, or cut the model again."
    )

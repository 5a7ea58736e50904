"""A stage on trial: what it needs of earlier stages, and what it could give to later ones."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.cutting.hollow import Hollow, fill, hollow_leaves
from penstock.cutting.repeated_inputs import RepeatedInputs
from penstock.cutting.rerun_stage import RerunStage, Spot, State
from penstock.cutting.unit_calls import UnitCall
from penstock.errors import StageError
from penstock.ir import StageId
from penstock.torch_private import pytree


class TrialStage(RerunStage):
    """A stage that finds out what it needs of earlier ones, and what it could give."""

    def __init__(
        self,
        stage: StageId,
        own: range,
        calls: Sequence[UnitCall],
        inputs: RepeatedInputs,
        earlier: Sequence["TrialStage"],
    ) -> None:
        super().__init__(stage, own, calls, inputs)
        self.available: dict[Spot, Tensor] = {}
        """The values that it has when the calls after its own are made."""
        self.sources: list[StageId] = []
        """The stages that the received values come from."""
        self.has_given = False
        """Whether it has come to calls after its own, so that it may end."""
        self._earlier = earlier

    def _take(self, state: State, number: int, tree: Any) -> Any:
        for k, leaf in enumerate(pytree.tree_leaves(tree)):
            if isinstance(leaf, Hollow) and leaf.filled is None and self._is_wanted(number):
                for other in reversed(self._earlier):
                    if (number, k) in other.available:
                        self.received.append((number, k))
                        self.sources.append(other.stage)
                        value = _received(other.available[number, k])
                        leaf.filled = self.unshared(number, k, value)
                        break
        tree = fill(tree)
        if number == self.end and self.is_last:
            for leaf in hollow_leaves(tree):
                raise StageError(
                    f"the model returns a value of {leaf.origin}, which another stage computes and "
                    "no stage can send: it is not an argument of a layer. Let the model return "
                    "less, or cut it elsewhere."
                )
        return tree

    def _is_wanted(self, number: int) -> bool:
        return number in self.own or self.is_last

    def _note_given(self, state: State, number: int, tree: Any) -> None:
        if number < self.own.stop:
            return
        self.has_given = True
        for k, leaf in enumerate(pytree.tree_leaves(tree)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, Hollow):
                self.available[number, k] = leaf.detach()


def _received(value: Tensor) -> Tensor:
    """Return a value as a stage receives it: a leaf of the graph that needs a gradient."""
    copy = value.clone()
    return copy.requires_grad_() if copy.is_floating_point() else copy

"""A stage that runs the whole model's forward, with the other stages' units left out.

    forward:   embed ── unit 0 ── unit 1 ──┆── unit 2 ── unit 3 ── head
    stage 0    embed ── unit 0 ── unit 1 ──┆ ends here: the arguments of unit 2 are its outputs
    stage 1    ·······  ······    ······   ┆── unit 2 ── unit 3 ── head     · hollow

Units of other stages are not run and return hollow tensors. Masks and positions, which depend on
the model's inputs alone, are computed again, so every stage takes these inputs by keyword.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.cutting.foreign_draws import ForeignDraws
from penstock.cutting.hollow import Hollow, Whereabouts, fill
from penstock.cutting.repeated_inputs import RepeatedInputs
from penstock.cutting.unit_calls import UnitCall, containers_in
from penstock.errors import StageError
from penstock.ir import StageId
from penstock.torch_private import pytree

Spot: TypeAlias = tuple[int, int]
"""A value in the forward: the number of a unit's call, and that of a leaf of its arguments. The
outputs of the model are those of a call after the last one."""


class _Ended(BaseException):
    """The end of a stage's part of the forward. Not an Exception, which models may catch."""


@dataclass(slots=True)
class State:
    """The state of one forward."""

    received: Sequence[Any]
    number: int = 0
    is_inside: bool = False
    given: dict[Spot, Any] = field(default_factory=dict)


class RerunStage:
    """The forward of one stage."""

    def __init__(
        self, stage: StageId, own: range, calls: Sequence[UnitCall], inputs: RepeatedInputs
    ) -> None:
        self.stage, self.own, self.calls, self.inputs = stage, own, calls, inputs
        self.received: list[Spot] = []
        """The values that it receives, in order: where it first meets each."""
        self.given: list[Spot] = []
        """The values that it gives, in order."""
        self.whereabouts = Whereabouts(torch.device("cpu"))
        self.watches_draws = False
        """Whether code between layers of other stages draws random numbers."""
        self._state: State | None = None

    @property
    def end(self) -> int:
        """The number of the call that stands for the outputs of the model."""
        return len(self.calls)

    @property
    def is_last(self) -> bool:
        return self.own.stop == self.end

    def __call__(self, forward: Callable[..., Any], received: tuple[Any, ...], inputs: Any) -> Any:
        """Run the model's `forward` as this stage; return its outputs."""
        inputs = self.inputs.take(self.stage, dict(inputs))
        if len(received) != len(self.received):
            raise StageError(
                f"stage {self.stage} was given {len(received)} positional arguments. Expected "
                f"{len(self.received)} values from earlier stages, and the model's inputs by "
                "keyword: give them to step() on every rank."
            )
        if self._state is not None:
            raise StageError(
                f"stage {self.stage} is called while it runs. Expected one forward at a time."
            )
        device = next((x.device for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)), None)
        self.whereabouts.device = device or self.whereabouts.device
        state = self._state = State(received)
        try:
            if not self.watches_draws:
                return self._finish(state, forward(**inputs))
            with self.watch_draws() as draws:
                output = forward(**inputs)
            draws.check_unused(output)
            return self._finish(state, output)
        except _Ended:
            return tuple(state.given[spot] for spot in self.given)
        finally:
            self._state = None

    def watch_draws(self, *, is_trial: bool = False) -> ForeignDraws:
        """Return a mode in which random numbers of other stages are hollow."""
        return ForeignDraws(self._is_elsewhere, self.whereabouts, is_trial=is_trial)

    def _is_elsewhere(self) -> bool:
        """Return whether the forward is in a part that belongs to another stage."""
        state = self._state
        if state is None or state.is_inside:
            return False
        is_early = self.own.start > 0 and state.number <= self.own.start
        return is_early or state.number > self.own.stop

    def _finish(self, state: State, output: Any) -> Any:
        if state.number != self.end:
            missing = self.calls[state.number].name
            raise StageError(
                f"stage {self.stage}: the model's forward did not call {missing}, as it did on the "
                f"example. {_SAME_LAYERS}"
            )
        output = self._take(state, self.end, output)
        if not self.is_last:
            self._note_given(state, self.end, output)
            raise _Ended
        return output

    def call(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a unit, or return hollow outputs if it belongs to another stage."""
        state = self._state
        if state is None or state.is_inside:  # A checkpoint is computed again, or a unit in one.
            args, kwargs = fill((args, kwargs))
            return forward(*args, **kwargs)
        number = state.number
        if number >= self.end or self.calls[number].name != name:
            expected = self.calls[number].name if number < self.end else "no further layer"
            raise StageError(
                f"stage {self.stage}: the model's forward calls {name}, but on the example it "
                f"called {expected} there. {_SAME_LAYERS}"
            )
        state.number += 1
        if number not in self.own:
            args, kwargs = fill((args, kwargs))
            self._note_given(state, number, (args, kwargs))
            return self._outputs(number, args, kwargs)
        args, kwargs = self._take(state, number, (args, kwargs))
        state.is_inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            state.is_inside = False

    def _take(self, state: State, number: int, tree: Any) -> Any:
        """Fill in the values that were received and are first met here."""
        leaves: list[Any] | None = None
        for place, (where, k) in enumerate(self.received):
            if where != number:
                continue
            if leaves is None:
                leaves = pytree.tree_leaves(tree)
            leaf = leaves[k] if k < len(leaves) else None
            if self.watches_draws and isinstance(leaf, Tensor) and not isinstance(leaf, Hollow):
                continue  # Nothing is drawn in eval mode, so it is the same here.
            if not isinstance(leaf, Hollow):
                raise StageError(
                    f"stage {self.stage}: argument {k} of {self._name(number)} is not the value of "
                    f"another stage that it was on the example. {_SAME_LAYERS}"
                )
            if leaf.filled is None:
                value = state.received[place]
                self._check_dtype(number, k, leaf, value)
                leaf.filled = self.unshared(number, k, value)
        return fill(tree)

    def unshared(self, number: int, k: int, value: Tensor) -> Tensor:
        """Return a value that was received, or a copy if it is changed in place."""
        is_written = number < self.end and k in self.calls[number].written
        return value.clone() if is_written else value

    def _check_dtype(self, number: int, k: int, leaf: Hollow, value: Tensor) -> None:
        """Raise an error if a value has another dtype than on the example.

        What was computed beside it, such as a mask, has the dtype of the example. Under autocast,
        layers choose dtypes by themselves.
        """
        dtype, expected = value.dtype, leaf.form.dtype
        if dtype != expected and not torch.is_autocast_enabled(value.device.type):
            raise StageError(
                f"stage {self.stage}: argument {k} of {self._name(number)} is a tensor of {dtype}, "
                f"but of {expected} on the example. A model that is cut without tracing must keep "
                "its dtype: convert it before it is cut, and use autocast for mixed precision."
            )

    def _note_given(self, state: State, number: int, tree: Any) -> None:
        """Keep what other stages need of these arguments; end the forward if that is all."""
        wanted = [k for where, k in self.given if where == number]
        if not wanted:
            return
        leaves = pytree.tree_leaves(tree)
        for k in wanted:
            value = leaves[k] if k < len(leaves) else None
            if not isinstance(value, Tensor) or isinstance(value, Hollow):
                raise StageError(
                    f"stage {self.stage}: argument {k} of {self._name(number)} is not a tensor "
                    f"that this stage has, as it was on the example. {_SAME_LAYERS}"
                )
            state.given[number, k] = value
        if len(state.given) == len(self.given) and number >= self.own.stop:
            raise _Ended

    def _outputs(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of a unit of another stage."""
        call = self.calls[number]
        for place, container in enumerate(containers_in((args, kwargs))):
            if place not in call.changes:
                continue
            changed = self._hollow(call.name, call.changes[place])
            if isinstance(container, list):
                container.extend(changed[len(container) :])
            else:
                container.update({k: v for k, v in changed.items() if k not in container})
        return self._hollow(call.name, call.output)

    def _hollow(self, origin: str, forms: Any) -> Any:
        def hollow(form: Tensor) -> Hollow:
            return Hollow.like(form, origin, self.whereabouts)

        return pytree.tree_map_only(Tensor, hollow, forms)

    def _name(self, number: int) -> str:
        return self.calls[number].name if number < self.end else "the model's outputs"


def units_of(calls: Sequence[UnitCall]) -> Iterator[str]:
    """Yield the name of each unit once."""
    yield from dict.fromkeys(call.name for call in calls)


_SAME_LAYERS = (
    "A model that is cut without tracing must call the same layers in the same order for every "
    "microbatch: turn off layer dropping (layerdrop=0), and cut it with an example like the "
    "microbatches."
)

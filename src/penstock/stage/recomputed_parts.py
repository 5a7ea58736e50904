"""Parts of a stage whose forwards run twice: for their outputs, and again for their backwards.

The graph of the first forward stays. Where a part would save a tensor in it, there is a *blank*.
The second run of the part fills the blanks in, in the same order, and its own graph is dropped.

    F   x ── first ── part ── last ── y      the graph that the backward runs through
                      [ ][ ]                 blanks of the part
    R         copy ── part                   the same inputs, buffers and random numbers
                      [s][t]                 the blanks are filled in
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.backward.structure import describe
from penstock.errors import StageError
from penstock.ir import MicrobatchId
from penstock.stage.passage import stand_in_for
from penstock.stage.repeating import (
    Repeated,
    RepeatedForwards,
    keeping_nothing,
    refuse_backward,
    saving,
    version_if_any,
)
from penstock.torch_private import pytree, top_saved_tensors_hooks, wrapped_calls

Note = Callable[[Any], None]


class RecomputedParts:
    """The parts of a stage that run twice in one step."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        place: str,
        *,
        is_sharded: bool,
    ) -> None:
        self.modules = modules
        self.device = device
        self.place = place
        self.forwards = {
            name: RepeatedForwards(
                [module], device, f"{place}, part {name!r}", is_sharded=is_sharded
            )
            for name, module in modules.items()
        }

    def begin(self, mb: MicrobatchId) -> "DroppedParts":
        """Return the calls of the parts in a forward that comes next."""
        return DroppedParts(self, mb)


class DroppedParts:
    """The calls of the parts in one forward, until they run again."""

    def __init__(self, parts: RecomputedParts, mb: MicrobatchId) -> None:
        self._parts = parts
        self._mb = mb
        self._calls: deque[_Call] = deque()
        self._is_inside = False
        self._hooks: Any = None

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Run the forward in this context: its parts keep nothing but what they began with."""
        self._hooks = top_saved_tensors_hooks(False)
        called: set[str] = set()
        with ExitStack() as stack:
            for name, module in self._parts.modules.items():
                stack.enter_context(wrapped_calls(module, self._wrapper(name, called)))
            yield
        missing = [name for name in self._parts.modules if name not in called]
        if missing:
            raise StageError(
                f"{self._parts.place}, microbatch {self._mb}: recomputed names {missing}, which "
                "the forward did not call as modules, so they cannot run again by themselves. "
                "Expected modules that every forward calls: leave these names out, or name a "
                "module around them."
            )

    def _wrapper(
        self, name: str, called: set[str]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                called.add(name)
                # One part may call another, which then runs again as a piece of the first.
                if self._is_inside or not torch.is_grad_enabled():
                    return call(*args, **kwargs)
                return self._drop(name, call, args, kwargs)

            return run

        return wrap

    def _drop(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        place = f"{self._parts.place}, part {name!r}, microbatch {self._mb}"
        if top_saved_tensors_hooks(False) != self._hooks:
            raise StageError(
                f"{place}: the part is called where hooks take over what a graph saves, as in a "
                "checkpoint or in save_on_cpu, so it would be computed again twice. Expected a "
                "part that is called outside of these: name the module that calls the "
                "checkpoint, or remove one of the two."
            )
        repeated = self._parts.forwards[name].begin(self._mb, args, kwargs)
        call = _Call(place, run, repeated, Autocast.now(self._parts.device))
        self._is_inside = True
        try:
            with keeping_nothing(call.add_blank, _Blank.take):
                outputs = run(*args, **kwargs)
        finally:
            self._is_inside = False
        repeated.settle()
        self._calls.append(call)
        return outputs

    def again(self, note: Note) -> None:
        """Run the parts again, so that the graph has what its backward needs; `note` sees it."""
        while self._calls:
            self._calls.popleft().again(note)


class _Call:
    """One call of a part: how to repeat it, and the blanks that this fills."""

    def __init__(
        self, place: str, run: Callable[..., Any], repeated: Repeated, autocast: "Autocast"
    ) -> None:
        self._place = place
        self._run = run
        self._repeated = repeated
        self._autocast = autocast
        self._blanks: list[_Blank] = []

    def add_blank(self, tensor: Tensor) -> "_Blank":
        blank = _Blank(self._place, tensor)
        self._blanks.append(blank)
        return blank

    def again(self, note: Note) -> None:
        """Fill the blanks, by another run of the part."""
        empty = iter(self._blanks)

        def fill(tensor: Tensor) -> None:
            blank = next(empty, None)
            if blank is None or not blank.fits(tensor):
                raise self._other(f"saves {describe(tensor)}, where the first saved {blank}")
            blank.fill(tensor)
            note(tensor)

        with self._repeated.again() as ((args, kwargs), copies), self._autocast.again():
            inputs = _Inputs({id(copy) for copy in copies.values()})
            args, kwargs = pytree.tree_map_only(Tensor, inputs.detached, (args, kwargs))
            with saving(fill, refuse_backward):
                self._run(*args, **kwargs)
        if (left := next(empty, None)) is not None:
            raise self._other(f"saves nothing, where the first saved {left}")

    def _other(self, how: str) -> StageError:
        return StageError(
            f"{self._place}: the second run of the forward {how}, so it computes something else. "
            "Expected a forward that does the same with the same inputs, buffers and random "
            "numbers: let it depend on nothing else, or leave the part out of recomputed."
        )


class _Blank:
    """The place of a tensor that a graph saves."""

    __slots__ = ("_dtype", "_num_changes", "_place", "_shape", "_tensor")

    def __init__(self, place: str, tensor: Tensor) -> None:
        self._place = place
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._tensor: Tensor | None = None
        self._num_changes = 0

    def __str__(self) -> str:
        return f"a tensor of shape {tuple(self._shape)} and {self._dtype}"

    def fits(self, tensor: Tensor) -> bool:
        return tensor.shape == self._shape and tensor.dtype is self._dtype

    def fill(self, tensor: Tensor) -> None:
        # Not the tensor itself: it leads to its own graph, and an output would lead to this blank.
        self._tensor = tensor.detach()
        self._num_changes = version_if_any(tensor)

    def take(self) -> Tensor:
        """Return the tensor to the backward; torch does not check that it is unchanged."""
        if self._tensor is None:
            return refuse_backward(None)
        if version_if_any(self._tensor) != self._num_changes:
            raise StageError(
                f"{self._place}: a tensor that the backward needs, {describe(self._tensor)}, was "
                "changed in place after it was saved, so gradients would be wrong. Expected it to "
                "stay unchanged: let the forward change a copy."
            )
        return self._tensor


class _Inputs:
    """The inputs of a part's second run, cut off from the graph that the first is in.

    `copies` has the ids of those that the part changes: autograd refuses that for a leaf.
    """

    def __init__(self, copies: set[int]) -> None:
        self._copies = copies
        self._known: dict[int, Tensor] = {}

    def detached(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._known:
            own = stand_in_for(tensor)
            is_changed = own.requires_grad and id(tensor) in self._copies
            self._known[id(tensor)] = own.clone() if is_changed else own
        return self._known[id(tensor)]


class Autocast(NamedTuple):
    """The dtypes that operations choose by themselves: by kind of device, if it is on."""

    kinds: tuple[tuple[str, bool, torch.dtype], ...]
    is_cached: bool

    @classmethod
    def now(cls, device: torch.device) -> "Autocast":
        kinds = dict.fromkeys(("cpu", device.type))
        states = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        return cls(tuple(states), torch.is_autocast_cache_enabled())

    def again(self) -> AbstractContextManager[Any]:
        """Return a context with this state."""
        if self == Autocast.now(torch.device(self.kinds[-1][0])):
            return nullcontext()
        stack = ExitStack()
        for kind, is_on, dtype in self.kinds:
            stack.enter_context(
                torch.autocast(kind, dtype, enabled=is_on, cache_enabled=self.is_cached)
            )
        return stack

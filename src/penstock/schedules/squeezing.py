"""Remove the gaps from orders in a V: run all ranks' passes, F and I, as early as possible.

Every pass takes one unit of time. Where a rank would wait, it runs a W that is due later; once it
has no forward left, W only fills the waits. The n-th W of a rank is that of its n-th I.

A pass is a number here, since large schedules have millions: F of microbatch mb on stage s is
s * m + mb, and I is 2pm more.
"""

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.ir import Action, BackwardInput, BackwardWeight, Forward, Rank
from penstock.schedules.generator import Shape

_UNKNOWN = -1  # The end of a pass that has not been run yet.


class Layout(NamedTuple):
    """The order of one rank before it is squeezed."""

    passes: "array[int]"
    due: "array[int]"
    """The number of passes before each W."""


def layout_of(shape: Shape, order: Iterable[Action]) -> Layout:
    """Return the layout of an order that is written action by action."""
    passes, due = array("i"), array("i")
    for action in order:
        if isinstance(action, BackwardWeight):
            due.append(len(passes))
        elif isinstance(action, Forward | BackwardInput):
            is_input = isinstance(action, BackwardInput)
            passes.append((2 * shape.p * is_input + action.stage) * shape.m + action.mb)
    return Layout(passes, due)


def squeeze(shape: Shape, lay_out: Callable[[Rank], Layout]) -> list[bytearray]:
    """Return, for each rank and place in its squeezed order, 1 if there is a W."""
    p, m, _ = shape
    # Before and after all stages, where nothing is waited for, passes have ended.
    free = array("i", [0]) * m
    ends = free + array("i", [_UNKNOWN]) * (4 * p * m) + free
    ranks = [_Rank(shape, lay_out(rank)) for rank in range(p)]
    waiting: dict[int, _Rank] = {}  # By the pass that a rank waits for; it runs on when this ends.
    ready = ranks[::-1]
    while ready:
        ready.pop().run(ends, waiting, ready)
    assert not waiting, "the orders cannot be run"
    return [rank.has_weight_at for rank in ranks]


def squeezed_order(shape: Shape, layout: Layout, has_weight_at: bytearray) -> list[Action]:
    """Return one rank's order, given its layout and the places of its W."""
    made = [_pass(shape, number) for number in layout.passes]
    following = iter(made)
    weights = iter([BackwardWeight(a.stage, a.mb) for a in made if isinstance(a, BackwardInput)])
    return [next(weights if is_weight else following) for is_weight in has_weight_at]


class _Rank:
    """One rank while its order is squeezed."""

    def __init__(self, shape: Shape, layout: Layout) -> None:
        self._passes, self._due = layout
        self._m = shape.m
        self._first_input = 2 * shape.p * shape.m
        places = range(len(self._passes) - 1, -1, -1)
        self._last_forward = next(n for n in places if self._passes[n] < self._first_input)
        self._time = 0
        self._num_inputs = 0
        self.has_weight_at = bytearray()
        self._num_weights = 0

    def run(self, ends: "array[int]", waiting: dict[int, "_Rank"], ready: list["_Rank"]) -> None:
        """Run until the end of a pass must be known that has not been run; wake who waits."""
        # Local names: millions of passes are run.
        passes, due, m, first_input = self._passes, self._due, self._m, self._first_input
        last_forward, places, time = self._last_forward, self.has_weight_at, self._time
        num_inputs, num_weights = self._num_inputs, self._num_weights
        place, num_passes, add = len(places) - num_weights, len(passes), places.append
        while place < num_passes:
            # After its last forward, a W can wait: memory no longer grows.
            is_due = num_weights < num_inputs and due[num_weights] <= place <= last_forward
            if not is_due:
                number = passes[place]
                is_input = number >= first_input
                # Shifted by m, as `ends` begins with those before all stages.
                before = number + 2 * m if is_input else number
                start = ends[before]
                if start <= time:
                    if start == _UNKNOWN:
                        waiting[before] = self
                        break
                    time += 1
                    ends[number + m] = time
                    add(0)
                    place += 1
                    num_inputs += is_input
                    if number + m in waiting:
                        ready.append(waiting.pop(number + m))
                    continue
                if num_weights == num_inputs:
                    time = start
                    continue
            time += 1
            add(1)
            num_weights += 1
        else:
            places.extend(b"\1" * (num_inputs - num_weights))
        self._time, self._num_inputs, self._num_weights = time, num_inputs, num_weights


def _pass(shape: Shape, number: int) -> Forward | BackwardInput:
    stage, mb = divmod(number, shape.m)
    kind = BackwardInput if stage >= 2 * shape.p else Forward
    return kind(stage % (2 * shape.p), mb)

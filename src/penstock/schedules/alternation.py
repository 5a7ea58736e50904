"""The two steps that most algorithms are made of."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from penstock.ir import Action, Backward, BackwardInput, BackwardWeight, Forward


def alternate(
    forwards: Sequence[Forward], backwards: Sequence[Backward], *, ahead: int
) -> Iterator[Action]:
    """Yield `ahead` forwards, then a backward and a forward in turn, then the other backwards."""
    yield from forwards[:ahead]
    for backward, forward in zip_longest(backwards, forwards[ahead:]):
        yield backward
        if forward is not None:
            yield forward


def delay_weights(order: Iterable[Action], *, delay: int) -> Iterator[Action]:
    """Split each B in two; up to `delay` W wait at a time, and the last follow at the end.

    With delay 1, `B0 B1 B2` becomes `I0 I1 W0 I2 W1 W2`.
    """
    waiting: deque[BackwardWeight] = deque()
    for action in order:
        if isinstance(action, Backward):
            yield BackwardInput(action.stage, action.mb)
            waiting.append(BackwardWeight(action.stage, action.mb))
            if len(waiting) > delay:
                yield waiting.popleft()
        else:
            yield action
    yield from waiting

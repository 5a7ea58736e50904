"""The random numbers of a forward, drawn once more when it is repeated."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch


class _State(NamedTuple):
    """The state of one generator, and the function that gives a state back to it."""

    put_back: Callable[[Any], object]
    state: Any


class RandomStates:
    """The states of all generators that a module on a device may draw from.

    These are torch's, Python's and, if it is loaded, numpy's, and those in `own`.
    """

    def __init__(self, device: torch.device, own: Sequence[torch.Generator]) -> None:
        self._device = device
        self._own = own
        self._states = [_State(random.setstate, random.getstate())]
        generators = [torch.default_generator, *own]
        self._states += [_State(each.set_state, each.get_state()) for each in generators]
        if device.type != "cpu":
            module = torch.get_device_module(device)
            put_back = partial(module.set_rng_state, device=device)
            self._states.append(_State(put_back, module.get_rng_state(device)))
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            self._states.append(_State(numpy_random.set_state, numpy_random.get_state()))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers again; after that, those that would have come next."""
        now = RandomStates(self._device, self._own)
        self._put_back()
        try:
            yield
        finally:
            now._put_back()

    def _put_back(self) -> None:
        for put_back, state in self._states:
            put_back(state)

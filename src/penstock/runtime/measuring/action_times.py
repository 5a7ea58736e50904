"""Time the actions of one step on one rank.

An action's time runs from the end of the action before it to its own end. It includes its sends and
what the runtime does around the action, but not the time in which the rank waits for messages. So
the times of a rank that never waits add up to the time of its step.
"""

import time
from collections.abc import Container, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from penstock.comm.abstract_comm import Describe, Transfer
from penstock.ir import Backward, BackwardInput, Forward, ReduceGrads, Send, Unshard
from penstock.ir.action import SHARDING_TYPES, Sharding, SingleCompute
from penstock.runtime.measuring.observer import AbstractClock, Endings


def now_s(device: torch.device) -> float:
    """Return the time in seconds, after an accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of an action: when the rank was free for it, its waits for messages, its end."""

    began_s: float
    waits_s: tuple[float, ...]
    """The wait for each message."""
    ended_s: float
    sending_s: float = 0.0
    """The time of its sends, which come after its end."""

    def cost_s(self, receipt_s: float) -> float:
        """Return its time without waits; taking a message that has arrived takes `receipt_s`."""
        waited_s = sum(max(0.0, wait_s - receipt_s) for wait_s in self.waits_s)
        return self.ended_s - self.began_s - waited_s + self.sending_s


@dataclass(frozen=True, slots=True)
class Collective:
    """A gather, free or reduction, after the first `place` forwards and backwards of the step."""

    action: Sharding
    place: int
    began_s: float
    ended_s: float


class Meter(AbstractClock):
    """A clock that times a step; `timings` has each forward and backward that has ended.

    While the step runs, it only notes when things happened, because every recorded step pays for
    that.
    """

    def __init__(self, device: torch.device) -> None:
        self.began_s = self.ended_s = 0.0
        self._device = device
        self._waits_s: list[float] = []
        self._ends: list[tuple[SingleCompute | Send | Sharding, float, int]] = []
        """For each action: itself, when it ended, and how many waits there had been by then."""
        self._endings: dict[int, list[Future[float]]] = {}
        """When collectives ended that ran on; by the place of their action in `_ends`."""

    def begin(self) -> None:
        self.began_s = self.ended_s = now_s(self._device)

    def wait_for(self, transfers: Iterable[Transfer], described: Describe) -> None:
        """Wait for the parts of a message, and note how long that took."""
        began_s = now_s(self._device)
        for transfer in transfers:
            transfer.wait(described)
        self._waits_s.append(now_s(self._device) - began_s)

    def end(self, action: SingleCompute | Send | Sharding) -> None:
        self.ended_s = now_s(self._device)
        self._ends.append((action, self.ended_s, len(self._waits_s)))

    def start(self, action: Unshard | ReduceGrads, endings: Endings) -> None:
        self._endings[len(self._ends)] = endings()
        self.end(action)

    @property
    def collectives(self) -> list[Collective]:
        """The gathers, frees and reductions, in their order; waits until they have ended."""
        found: list[Collective] = []
        began_s, place = self.began_s, 0
        for number, (action, ended_s, _) in enumerate(self._ends):
            if isinstance(action, SHARDING_TYPES):
                later_s = (ending.result() for ending in self._endings.get(number, ()))
                found.append(Collective(action, place, began_s, max([ended_s, *later_s])))
            elif not isinstance(action, Send):
                place += 1
            began_s = ended_s
        return found

    @property
    def timings(self) -> dict[SingleCompute, Timing]:
        """The timings in the order of the actions; a send counts for the action it sends for."""
        found: dict[SingleCompute, Timing] = {}
        began_s, num_before = self.began_s, 0
        for action, ended_s, num_waits in self._ends:
            if isinstance(action, Send):
                maker = _maker(action, found)
                sending_s = found[maker].sending_s + ended_s - began_s
                found[maker] = replace(found[maker], sending_s=sending_s)
            elif not isinstance(action, SHARDING_TYPES):
                waits_s = tuple(self._waits_s[num_before:num_waits])
                found[action] = Timing(began_s, waits_s, ended_s)
            began_s, num_before = ended_s, num_waits
        return found


def _maker(action: Send, made: Container[SingleCompute]) -> SingleCompute:
    """Return the action that made the message of a send."""
    if not action.message.is_gradient:
        return Forward(action.stage, action.mb)
    whole = Backward(action.stage, action.mb)
    return whole if whole in made else BackwardInput(action.stage, action.mb)

"""Times the actions of one step on one rank.

An action's time is all that passes between the end of the action before it and its own end, sends
included, but for what the rank waits for messages: so the times of a rank that never waits add up
to the time of its step, and what the runtime does around an action is part of the action.
"""

import time
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import torch

from penstock.comm.abstract_comm import Describe, Transfer
from penstock.ir import Backward, BackwardInput, Forward, Send
from penstock.ir.action import SingleCompute
from penstock.runtime.measuring.observer import AbstractClock


def now_s(device: torch.device) -> float:
    """Seconds, with what an accelerator had to do done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Timing:
    """When a rank was free for an action, how long it waited for messages, and when it was done."""

    began_s: float
    waits_s: tuple[float, ...]
    """One for each message."""
    ended_s: float
    sending_s: float = 0.0
    """What its sends took, which come after its end."""

    def cost_s(self, receipt_s: float) -> float:
        """What it takes if it need not wait; taking a message that is there takes `receipt_s`."""
        waited_s = sum(max(0.0, wait_s - receipt_s) for wait_s in self.waits_s)
        return self.ended_s - self.began_s - waited_s + self.sending_s


class Meter(AbstractClock):
    """Watches a step; `timings` has each forward and backward that has ended.

    While the step runs it only writes down when things happened, because every step that is
    recorded pays for that.
    """

    def __init__(self, device: torch.device) -> None:
        self.began_s = self.ended_s = 0.0
        self._device = device
        self._waits_s: list[float] = []
        self._ends: list[tuple[SingleCompute | Send, float, int]] = []
        """Of each action: itself, when it was done, and how many waits there had been by then."""

    def begin(self) -> None:
        self.began_s = self.ended_s = now_s(self._device)

    def wait_for(self, transfers: Iterable[Transfer], described: Describe) -> None:
        """Note how long that took."""
        began_s = now_s(self._device)
        for transfer in transfers:
            transfer.wait(described)
        self._waits_s.append(now_s(self._device) - began_s)

    def end(self, action: SingleCompute | Send) -> None:
        self.ended_s = now_s(self._device)
        self._ends.append((action, self.ended_s, len(self._waits_s)))

    @property
    def timings(self) -> dict[SingleCompute, Timing]:
        """In the order in which they were run; a send counts for the action that it sends of."""
        found: dict[SingleCompute, Timing] = {}
        began_s, num_before = self.began_s, 0
        for action, ended_s, num_waits in self._ends:
            if isinstance(action, Send):
                maker = _maker(action, found)
                sending_s = found[maker].sending_s + ended_s - began_s
                found[maker] = replace(found[maker], sending_s=sending_s)
            else:
                waits_s = tuple(self._waits_s[num_before:num_waits])
                found[action] = Timing(began_s, waits_s, ended_s)
            began_s, num_before = ended_s, num_waits
        return found


def _maker(action: Send, made: Container[SingleCompute]) -> SingleCompute:
    """The action whose result a send sends."""
    if not action.message.is_gradient:
        return Forward(action.stage, action.mb)
    whole = Backward(action.stage, action.mb)
    return whole if whole in made else BackwardInput(action.stage, action.mb)

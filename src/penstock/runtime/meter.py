"""Times the actions of one step on one rank, and counts what its microbatches hold.

An action's time is all that passes between the end of the action before it and its own end, sends
included, but for what the rank waits for messages: so the times of a rank that never waits add up
to the time of its step, and what the runtime does around an action is part of the action.
"""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from penstock.ir import Backward, BackwardInput, Forward, SendActivation
from penstock.ir.action import SEND_TYPES, Send, SingleCompute
from penstock.runtime.held import HeldBytes


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


class Meter:
    """Watches a step; `timings` has each forward and backward that has ended.

    If `held` is given it counts memory, which takes time: then the timings are worth nothing.
    """

    def __init__(self, device: torch.device, held: HeldBytes | None = None) -> None:
        self.timings: dict[SingleCompute, Timing] = {}
        self.held = held
        self.began_s = self.ended_s = 0.0
        self._device = device
        self._waits_s: list[float] = []

    def begin(self) -> None:
        """The step begins."""
        self.began_s = self.ended_s = now_s(self._device)

    def waiting(self) -> "_Waiting":
        """Around the wait for a message."""
        return _Waiting(self)

    def end(self, action: SingleCompute | Send) -> None:
        """An action is done, and what follows is the next one's."""
        began_s, self.ended_s = self.ended_s, now_s(self._device)
        if isinstance(action, SEND_TYPES):
            maker = self._maker(action)
            timing = self.timings[maker]
            sending_s = timing.sending_s + self.ended_s - began_s
            self.timings[maker] = replace(timing, sending_s=sending_s)
        else:
            waits_s, self._waits_s = tuple(self._waits_s), []
            self.timings[action] = Timing(began_s, waits_s, self.ended_s)

    def _maker(self, action: Send) -> SingleCompute:
        """The action whose result a send sends."""
        if isinstance(action, SendActivation):
            return Forward(action.stage, action.mb)
        whole = Backward(action.stage, action.mb)
        return whole if whole in self.timings else BackwardInput(action.stage, action.mb)

    def note_wait(self, began_s: float) -> None:
        self._waits_s.append(now_s(self._device) - began_s)

    def now_s(self) -> float:
        return now_s(self._device)


class _Waiting(AbstractContextManager[None]):
    __slots__ = ("_began_s", "_meter")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._began_s = self._meter.now_s()

    def __exit__(self, *_: object) -> None:
        self._meter.note_wait(self._began_s)

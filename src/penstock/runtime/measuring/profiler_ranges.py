"""Named ranges for torch.profiler: the actions, messages and losses of a step.

A step is given ranges only if a profiler runs when it begins: one that nobody profiles never asks
for any.
"""

from contextlib import AbstractContextManager
from typing import Any

from torch.autograd.profiler import record_function

from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    MicrobatchId,
    Recompute,
    ReduceGrads,
    Reshard,
    Send,
    StageId,
    Unshard,
)
from penstock.ir.action import Sharding, SingleCompute
from penstock.runtime.measuring.observer import AbstractRanges

_NAMES: dict[type, str] = {
    Forward: "F",
    Backward: "B",
    BackwardInput: "I",
    BackwardWeight: "W",
    Recompute: "R",
    Unshard: "gather",
    Reshard: "free",
    ReduceGrads: "reduce",
}


class ProfilerRanges(AbstractRanges):
    """Ranges as torch.profiler shows them, such as "F stage 2 microbatch 5"."""

    def computing(self, action: SingleCompute) -> AbstractContextManager[Any]:
        return record_function(f"{_NAMES[type(action)]} {_place(action.stage, action.mb)}")

    def sharding(self, action: Sharding) -> AbstractContextManager[Any]:
        return record_function(f"{_NAMES[type(action)]} stage {action.stage}")

    def sending(self, action: Send) -> AbstractContextManager[Any]:
        return record_function(f"send {_described(action.message)}")

    def waiting(self, message: Message) -> AbstractContextManager[Any]:
        return record_function(f"wait for {_described(message)}")

    def loss(self, stage: StageId, mb: MicrobatchId) -> AbstractContextManager[Any]:
        return record_function(f"loss {_place(stage, mb)}")

    def ending(self, what: str) -> AbstractContextManager[Any]:
        return record_function(what)


def _place(stage: StageId, mb: MicrobatchId) -> str:
    return f"stage {stage} microbatch {mb}"


def _described(message: Message) -> str:
    """Return the same words on both ranks, so that a search for them finds both ends."""
    return f"{message.kind} stage {message.maker} to {message.taker} microbatch {message.mb}"

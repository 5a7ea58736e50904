"""The memory page in which a rank writes where it is, and which its sentinel reads.

The rank writes for every action, so writing is one copy of a text that was made before. Nothing is
locked: a text that is read while it is written is wrong for a moment, and a rank that is dead or
stopped does not write.
"""

import mmap
import struct
from collections.abc import Collection
from typing import TypeAlias

SIZE = 4096
ACTION = slice(192, 320)
"""Where the action is: assign what `as_action` returns to this part of `Place.memory`."""
_STAGES = slice(64, 128)
_DOING = slice(128, 192)
_STEP = struct.Struct("=q")

Memory: TypeAlias = bytearray | mmap.mmap

IN_A_STEP = "in a step"
OUTSIDE = "outside of a step"


class Place:
    """Where a rank is: in which step and action, or what else it does."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._num_steps = 0
        self.enter(OUTSIDE)

    @classmethod
    def unread(cls) -> "Place":
        """Return a place that no sentinel reads."""
        return cls(bytearray(SIZE))

    def hold(self, stages: Collection[int]) -> None:
        """Note the stages of this rank."""
        words = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        self.memory[_STAGES] = _padded(words, _STAGES)

    def enter(self, doing: str) -> bytes:
        """Note what this rank does from now on, in words that follow a verb.

        Return what `go_back` takes.
        """
        before = self.memory[_DOING]
        self.memory[_DOING] = _padded(doing, _DOING)
        return bytes(before)

    def go_back(self, before: bytes) -> None:
        """Note that this rank goes on with what it did before."""
        self.memory[_DOING] = before

    def enter_step(self) -> Memory:
        """Note that the next step begins; return the memory for its actions."""
        self._num_steps += 1
        _STEP.pack_into(self.memory, 0, self._num_steps)
        self.memory[ACTION] = _NO_ACTION
        self.memory[_DOING] = _STEP_TEXT
        return self.memory

    def leave_actions(self) -> None:
        """Note that all actions of the step are over."""
        self.memory[ACTION] = _NO_ACTION


def as_action(text: str) -> bytes:
    """Return an action's words as they are written to the page."""
    return _padded(text, ACTION)


def read_place(memory: Memory) -> str:
    """Return where the rank is, in words that follow a verb."""
    doing = _text(memory, _DOING)
    if doing != IN_A_STEP:
        return doing
    (step,) = _STEP.unpack_from(memory)
    action = _text(memory, ACTION)
    return f"in step {step}, in {action}" if action else f"in step {step}"


def read_stages(memory: Memory) -> str:
    """Return the stages of the rank, in words; empty if it has not said."""
    return _text(memory, _STAGES)


def _padded(text: str, part: slice) -> bytes:
    size: int = part.stop - part.start
    return text.encode("ascii", "replace")[:size].ljust(size, b"\0")


def _text(memory: Memory, part: slice) -> str:
    return bytes(memory[part]).rstrip(b"\0").decode("ascii", "replace")


_NO_ACTION = _padded("", ACTION)
_STEP_TEXT = _padded(IN_A_STEP, _DOING)

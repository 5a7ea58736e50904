"""What a step tells those who watch it: a clock, and a count of the memory it holds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.comm.abstract_comm import Describe, Transfer
from penstock.ir import Message, Send
from penstock.ir.action import SingleCompute
from penstock.ir.dataflow import Dataflow
from penstock.runtime.program import Task
from penstock.stage import PipelineStage

Note: TypeAlias = Callable[[Any], None]
"""Takes the outputs of a stage that has computed."""
Leaves: TypeAlias = list[Any]
"""The leaves of one message, tensors and others; an observer may put copies in their place."""


class StepView(Protocol):
    """What a memory count may ask a step."""

    def made_by(self, task: Task) -> Sequence[Leaves]:
        """What a task made for other stages, before it is sent."""

    def kept_of(self, task: Task) -> Any:
        """What a task made for the caller: outputs and loss."""


class AbstractClock(ABC):
    """Is told when things happen in a step."""

    @abstractmethod
    def begin(self) -> None:
        """The step begins."""

    @abstractmethod
    def wait_for(self, transfers: Iterable[Transfer], described: Describe) -> None:
        """Wait for the parts of a message."""

    @abstractmethod
    def end(self, action: SingleCompute | Send) -> None:
        """An action is done, and what follows is the next one's."""


class AbstractMemoryCount(ABC):
    """Is told what a step's tensors are, and whose."""

    @abstractmethod
    def begin(self, flow: Dataflow) -> None:
        """The step begins."""

    @abstractmethod
    def take_over(self, leaves: Leaves) -> Leaves:
        """A stage takes what another of this rank made; returns what it is to work with."""

    @abstractmethod
    def arrived(self, messages: Sequence[Message], leaves: Sequence[Leaves]) -> None:
        """An action has the messages that it waited for, and begins to compute."""

    @abstractmethod
    def watching(self, stage: PipelineStage, arguments: Any) -> AbstractContextManager[Note]:
        """While a stage computes: forward, loss or backward; gives what takes its outputs."""

    @abstractmethod
    def computed(self, task: Task, step: StepView) -> None:
        """A task is done."""


class NoClock(AbstractClock):
    """Notes nothing, and waits."""

    def begin(self) -> None:
        pass

    def wait_for(self, transfers: Iterable[Transfer], described: Describe) -> None:
        for transfer in transfers:
            transfer.wait(described)

    def end(self, action: SingleCompute | Send) -> None:
        pass


class NoMemoryCount(AbstractMemoryCount):
    """Counts nothing."""

    def begin(self, flow: Dataflow) -> None:
        pass

    def take_over(self, leaves: Leaves) -> Leaves:
        return leaves

    def arrived(self, messages: Sequence[Message], leaves: Sequence[Leaves]) -> None:
        pass

    def watching(self, stage: PipelineStage, arguments: Any) -> AbstractContextManager[Note]:
        return _WATCHES_NOTHING

    def computed(self, task: Task, step: StepView) -> None:
        pass


def note_nothing(outputs: Any) -> None:
    """Take the outputs of a stage whose operations are watched, or of which none are."""


_WATCHES_NOTHING: AbstractContextManager[Note] = nullcontext(note_nothing)


@dataclass(frozen=True, slots=True)
class Observer:
    """Watches one step. Counting memory takes time, so it is not done where times matter."""

    clock: AbstractClock = field(default_factory=NoClock)
    memory: AbstractMemoryCount = field(default_factory=NoMemoryCount)


UNWATCHED = Observer()

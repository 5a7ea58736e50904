"""The observer of a step: a clock, and a count of the memory that the step holds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.comm.abstract_comm import Describe, Transfer
from penstock.ir import Message, ReduceGrads, Reshard, Send, Unshard
from penstock.ir.action import SingleCompute
from penstock.ir.dataflow import Dataflow
from penstock.runtime.program import Task
from penstock.stage import PipelineStage

Note: TypeAlias = Callable[[Any], None]
"""A function that takes the outputs of a stage that has computed."""
Leaves: TypeAlias = list[Any]
"""The leaves of one message, tensors and others; an observer may put copies in their place."""

Endings: TypeAlias = Callable[[], list[Future[float]]]
"""A function that returns when collectives end that were just started, once they have ended."""


class StepView(Protocol):
    """The part of a step that a memory count may use."""

    def made_by(self, task: Task) -> Sequence[Leaves]:
        """Return what a task made for other stages, before it is sent."""

    def kept_of(self, task: Task) -> Any:
        """Return what a task made for the caller: outputs and loss."""


class AbstractClock(ABC):
    """A clock that notes when things happen in a step."""

    @abstractmethod
    def begin(self) -> None:
        """Note that the step begins."""

    @abstractmethod
    def wait_for(self, transfers: Iterable[Transfer], described: Describe) -> None:
        """Wait for the parts of a message."""

    @abstractmethod
    def end(self, action: SingleCompute | Send | Reshard) -> None:
        """Note the end of an action; the time that follows belongs to the next one."""

    @abstractmethod
    def start(self, action: Unshard | ReduceGrads, endings: Endings) -> None:
        """Note the start of collectives; the time that follows belongs to the next action."""


class AbstractMemoryCount(ABC):
    """A count of the memory that the tensors of a step take."""

    @abstractmethod
    def begin(self, flow: Dataflow) -> None:
        """Note that the step begins."""

    @abstractmethod
    def take_over(self, leaves: Leaves) -> Leaves:
        """Return what a stage is to use for leaves that another stage of this rank made."""

    @abstractmethod
    def arrived(self, messages: Sequence[Message], leaves: Sequence[Leaves]) -> None:
        """Note that an action has the messages it waited for, and begins to compute."""

    @abstractmethod
    def watching(self, stage: PipelineStage, arguments: Any) -> AbstractContextManager[Note]:
        """Return a context for a stage's forward, loss or backward; it yields a `Note`."""

    @abstractmethod
    def computed(self, task: Task, step: StepView) -> None:
        """Note that a task is done."""


class NoClock(AbstractClock):
    """A clock that waits, and notes nothing."""

    def begin(self) -> None:
        pass

    def wait_for(self, transfers: Iterable[Transfer], described: Describe) -> None:
        for transfer in transfers:
            transfer.wait(described)

    def end(self, action: SingleCompute | Send | Reshard) -> None:
        pass

    def start(self, action: Unshard | ReduceGrads, endings: Endings) -> None:
        pass


class NoMemoryCount(AbstractMemoryCount):
    """A memory count that counts nothing."""

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
    """Ignore the outputs of a stage: its operations are watched, or nothing is."""


_WATCHES_NOTHING: AbstractContextManager[Note] = nullcontext(note_nothing)


@dataclass(frozen=True, slots=True)
class Observer:
    """A clock and a memory count for one step. Counting is slow, so timed steps do without."""

    clock: AbstractClock = field(default_factory=NoClock)
    memory: AbstractMemoryCount = field(default_factory=NoMemoryCount)


UNWATCHED = Observer()

"""The observer of a step: a clock, a count of the memory it holds, and names for its parts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.comm.abstract_comm import Describe, Transfer
from penstock.ir import Message, MicrobatchId, ReduceGrads, Reshard, Send, StageId, Unshard
from penstock.ir.action import Sharding, SingleCompute
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

    stages: Mapping[StageId, PipelineStage]

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


class AbstractRanges(ABC):
    """Contexts for the parts of a step, which give them names for whoever profiles it."""

    @abstractmethod
    def computing(self, action: SingleCompute) -> AbstractContextManager[Any]:
        """Return a context for a forward or backward, from the arrival of its messages on."""

    @abstractmethod
    def sharding(self, action: Sharding) -> AbstractContextManager[Any]:
        """Return a context for the start of a gather or reduction, or for a free."""

    @abstractmethod
    def sending(self, action: Send) -> AbstractContextManager[Any]:
        """Return a context for handing a message to its channel."""

    @abstractmethod
    def waiting(self, message: Message) -> AbstractContextManager[Any]:
        """Return a context for the wait for a message of another rank."""

    @abstractmethod
    def loss(self, stage: StageId, mb: MicrobatchId) -> AbstractContextManager[Any]:
        """Return a context for the loss of a microbatch, which is a part of its forward."""

    @abstractmethod
    def ending(self, what: str) -> AbstractContextManager[Any]:
        """Return a context for something at the end of the step."""


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


class NoRanges(AbstractRanges):
    """Contexts that do nothing."""

    def computing(self, action: SingleCompute) -> AbstractContextManager[Any]:
        return _NAMELESS

    def sharding(self, action: Sharding) -> AbstractContextManager[Any]:
        return _NAMELESS

    def sending(self, action: Send) -> AbstractContextManager[Any]:
        return _NAMELESS

    def waiting(self, message: Message) -> AbstractContextManager[Any]:
        return _NAMELESS

    def loss(self, stage: StageId, mb: MicrobatchId) -> AbstractContextManager[Any]:
        return _NAMELESS

    def ending(self, what: str) -> AbstractContextManager[Any]:
        return _NAMELESS


def note_nothing(outputs: Any) -> None:
    """Ignore the outputs of a stage: its operations are watched, or nothing is."""


_WATCHES_NOTHING: AbstractContextManager[Note] = nullcontext(note_nothing)
_NAMELESS: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, slots=True)
class Observer:
    """What watches one step. Counting memory is slow, so timed steps do without."""

    clock: AbstractClock = field(default_factory=NoClock)
    memory: AbstractMemoryCount = field(default_factory=NoMemoryCount)
    ranges: AbstractRanges = field(default_factory=NoRanges)


UNWATCHED = Observer()

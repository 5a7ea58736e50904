"""What a rank can do: one frozen type per kind of action.

`str()` of an action is its cell in the text format, such as `2F0`: stage 2, forward, microbatch 0.
"""

from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from penstock.errors import ScheduleError
from penstock.ir.message import Message, MicrobatchId, StageId


@dataclass(frozen=True, slots=True)
class Forward:
    """Runs `stage` on `mb`."""

    stage: StageId
    mb: MicrobatchId

    def __str__(self) -> str:
        return f"{self.stage}F{self.mb}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Gradients of the inputs and of the weights of `stage` for `mb`, in one piece."""

    stage: StageId
    mb: MicrobatchId

    def __str__(self) -> str:
        return f"{self.stage}B{self.mb}"


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Gradients of the inputs of `stage` for `mb`; its BackwardWeight must follow."""

    stage: StageId
    mb: MicrobatchId

    def __str__(self) -> str:
        return f"{self.stage}I{self.mb}"


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Gradients of the weights of `stage` for `mb`; must follow its BackwardInput."""

    stage: StageId
    mb: MicrobatchId

    def __str__(self) -> str:
        return f"{self.stage}W{self.mb}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward of another microbatch, run together."""

    forward: Forward
    backward: Backward | BackwardInput

    def __post_init__(self) -> None:
        is_backward = isinstance(self.backward, Backward | BackwardInput)
        if not (isinstance(self.forward, Forward) and is_backward):
            raise ScheduleError(
                f"An overlap of {self.forward} and {self.backward} cannot be run. "
                "Give it a Forward, and a Backward or BackwardInput."
            )

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a message to the rank of the stage that takes it; does not wait."""

    message: Message

    @property
    def stage(self) -> StageId:
        return self.message.maker

    @property
    def mb(self) -> MicrobatchId:
        return self.message.mb

    def __str__(self) -> str:
        return f"{self.stage}SEND_{_letter(self.message)}{self.mb}" + (
            f">{self.message.taker}" if self.message.skip else ""
        )


@dataclass(frozen=True, slots=True)
class Recv:
    """Where a rank that takes its messages one by one waits for this one.

    Penstock's own runtime does not: it posts receives ahead, in the order of each channel, and an
    action waits for what it needs. So receives are there for other runtimes, in files, and in
    `simulate(blocking=True)`.
    """

    message: Message

    @property
    def stage(self) -> StageId:
        return self.message.taker

    @property
    def mb(self) -> MicrobatchId:
        return self.message.mb

    def __str__(self) -> str:
        return f"{self.stage}RECV_{_letter(self.message)}{self.mb}" + (
            f"<{self.message.maker}" if self.message.skip else ""
        )


def _letter(message: Message) -> str:
    return "B" if message.is_gradient else "F"


SingleCompute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
Compute: TypeAlias = SingleCompute | Overlap
Comm: TypeAlias = Send | Recv
Action: TypeAlias = Compute | Comm
"""One thing that a rank does."""

SINGLE_COMPUTE_TYPES = (Forward, Backward, BackwardInput, BackwardWeight)
COMPUTE_TYPES = (*SINGLE_COMPUTE_TYPES, Overlap)
# The backwards that the stage before waits for.
URGENT_BACKWARD_TYPES = (Backward, BackwardInput)
COMM_TYPES = (Send, Recv)


def is_compute(action: Action) -> TypeGuard[Compute]:
    """Whether `action` is a forward or backward, or a pair of them."""
    return isinstance(action, COMPUTE_TYPES)


def parts(action: Action) -> tuple[SingleCompute | Comm, ...]:
    """The actions in `action` that have a stage of their own: two in an overlap."""
    return (action.forward, action.backward) if isinstance(action, Overlap) else (action,)


def compute_parts(action: Action) -> tuple[SingleCompute, ...]:
    """The forwards and backwards in `action`: two in an overlap, none in a send or receive."""
    # Asked of every action by all that goes through a schedule; `match` takes twice as long.
    if isinstance(action, SINGLE_COMPUTE_TYPES):
        return (action,)
    if isinstance(action, Overlap):
        return (action.forward, action.backward)
    return ()


def in_words(action: Action) -> str:
    """The action as people say it: 0F3 (forward of microbatch 3 on stage 0)."""
    words = {
        Forward: "forward",
        Backward: "backward",
        BackwardInput: "input backward",
        BackwardWeight: "weight backward",
    }
    if isinstance(action, Send | Recv):
        verb, message = "sending" if isinstance(action, Send) else "receiving", action.message
        described = (
            f"{verb} the {message.kind} of microbatch {message.mb} "
            f"from stage {message.maker} to stage {message.taker}"
        )
    else:
        described = " and ".join(
            f"{words[type(part)]} of microbatch {part.mb} on stage {part.stage}"
            for part in compute_parts(action)
        )
    return f"{action} ({described})"

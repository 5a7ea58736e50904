"""The actions of a rank: one frozen type per kind.

`str()` of an action is its cell in the text format, such as `2F0`: stage 2, forward, microbatch 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from penstock.errors import ScheduleError
from penstock.ir.message import Message, MicrobatchId, StageId


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward of `stage` for `mb`."""

    stage: StageId
    mb: MicrobatchId

    def __str__(self) -> str:
        return f"{self.stage}F{self.mb}"


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradients of the inputs and weights of `stage` for `mb`, computed together."""

    stage: StageId
    mb: MicrobatchId

    def __str__(self) -> str:
        return f"{self.stage}B{self.mb}"


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """The gradients of the inputs of `stage` for `mb`; its BackwardWeight must follow."""

    stage: StageId
    mb: MicrobatchId

    def __str__(self) -> str:
        return f"{self.stage}I{self.mb}"


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The gradients of the weights of `stage` for `mb`; must follow its BackwardInput."""

    stage: StageId
    mb: MicrobatchId

    def __str__(self) -> str:
        return f"{self.stage}W{self.mb}"


@dataclass(frozen=True, slots=True)
class Recompute:
    """The forward of `stage` for `mb` once more, for its backward, which must follow.

    The Forward of this stage and microbatch then keeps nothing but its inputs.
    """

    stage: StageId
    mb: MicrobatchId

    def __str__(self) -> str:
        return f"{self.stage}R{self.mb}"


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
    """A message sent to the rank of the stage that takes it; the send does not wait."""

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
    """The place in an order where a rank waits for one message.

    Penstock's own runtime does not execute it: it posts receives ahead, in the order of each
    channel, and an action waits for its inputs. Receives are for other runtimes, in files, and for
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


@dataclass(frozen=True, slots=True)
class Unshard:
    """The gather of the parameters of `stage`, which are sharded over replicas.

    The stage's forwards and input or full backwards need them until its Reshard.
    """

    stage: StageId

    def __str__(self) -> str:
        return f"{self.stage}UNSHARD"


@dataclass(frozen=True, slots=True)
class Reshard:
    """The end of the gathered parameters of `stage`: their memory is freed."""

    stage: StageId

    def __str__(self) -> str:
        return f"{self.stage}RESHARD"


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """The sum of the weight gradients of `stage` over replicas, once in a step."""

    stage: StageId

    def __str__(self) -> str:
        return f"{self.stage}REDUCE_GRAD"


def _letter(message: Message) -> str:
    return "B" if message.is_gradient else "F"


SingleCompute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight | Recompute
Compute: TypeAlias = SingleCompute | Overlap
Comm: TypeAlias = Send | Recv
Sharding: TypeAlias = Unshard | Reshard | ReduceGrads
Action: TypeAlias = Compute | Comm | Sharding
"""One thing that a rank does."""

SINGLE_COMPUTE_TYPES = (Forward, Backward, BackwardInput, BackwardWeight, Recompute)
COMPUTE_TYPES = (*SINGLE_COMPUTE_TYPES, Overlap)
# The backwards that the previous stage waits for.
URGENT_BACKWARD_TYPES = (Backward, BackwardInput)
BACKWARD_TYPES = (Backward, BackwardInput, BackwardWeight)
COMM_TYPES = (Send, Recv)
SHARDING_TYPES = (Unshard, Reshard, ReduceGrads)


def is_compute(action: Action) -> TypeGuard[Compute]:
    """Return whether `action` is a forward, a backward, a recomputation or an overlap."""
    return isinstance(action, COMPUTE_TYPES)


def parts(action: Action) -> tuple[SingleCompute | Comm | Sharding, ...]:
    """Return the actions in `action` that have one stage each: two for an overlap."""
    return (action.forward, action.backward) if isinstance(action, Overlap) else (action,)


def compute_parts(action: Action) -> tuple[SingleCompute, ...]:
    """Return the computes in `action`: two in an overlap, none if it is not a compute."""
    # Called for every action, often: `match` would take twice as long.
    if isinstance(action, SINGLE_COMPUTE_TYPES):
        return (action,)
    if isinstance(action, Overlap):
        return (action.forward, action.backward)
    return ()


def recomputed_by(order: Iterable[Action]) -> frozenset[tuple[StageId, MicrobatchId]]:
    """Return the stages and microbatches whose forwards an order runs again."""
    return frozenset((a.stage, a.mb) for a in order if isinstance(a, Recompute))


def gathered_stages(action: Action) -> tuple[StageId, ...]:
    """Return the stages whose parameters `action` needs: those of its F, B, I and R.

    A weight backward needs none: the input of a layer and the gradient of its output are enough.
    """
    return tuple(
        part.stage for part in compute_parts(action) if not isinstance(part, BackwardWeight)
    )


def in_words(action: Action) -> str:
    """Return the action in words: 0F3 (forward of microbatch 3 on stage 0)."""
    words = {
        Forward: "forward",
        Backward: "backward",
        BackwardInput: "input backward",
        BackwardWeight: "weight backward",
        Recompute: "recomputation",
        Unshard: "gathering the parameters",
        Reshard: "freeing the gathered parameters",
        ReduceGrads: "reducing the gradients",
    }
    if isinstance(action, Send | Recv):
        verb, message = "sending" if isinstance(action, Send) else "receiving", action.message
        described = (
            f"{verb} the {message.kind} of microbatch {message.mb} "
            f"from stage {message.maker} to stage {message.taker}"
        )
    elif isinstance(action, SHARDING_TYPES):
        described = f"{words[type(action)]} of stage {action.stage}"
    else:
        described = " and ".join(
            f"{words[type(part)]} of microbatch {part.mb} on stage {part.stage}"
            for part in compute_parts(action)
        )
    return f"{action} ({described})"

"""Hypothesis strategies for random networks and for orders of I and W."""

from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st
from networks import Network, Output
from pieces import (
    RAW_KINDS,
    Addmm,
    Again,
    Block,
    Conv,
    Embedding,
    HookOnValue,
    InPlace,
    Linear,
    Norm,
    Piece,
    Pieces,
    Pointwise,
    Positions,
    PythonFunction,
    QueryAttention,
    Raw,
    RawReuse,
    SecondInput,
    Unused,
    WeightNorm,
)

# F: forward, B: full backward, I and W: its halves; each with the number of a microbatch.
Event = tuple[Literal["F", "B", "I", "W"], int]


@dataclass(frozen=True)
class ParamHook:
    """A hook on the `param`-th trainable parameter."""

    kind: Literal["see", "double", "post"]
    param: int


@dataclass(frozen=True)
class Case:
    """A network, its inputs' kinds, the hooks on its parameters and the order of events."""

    network: Network
    x: Literal["leaf", "computed", "constant"]
    y: Literal["leaf", "computed", "constant"]
    hooks: tuple[ParamHook, ...]
    has_loss: bool
    events: tuple[Event, ...]


def pieces(depth: int = 2) -> st.SearchStrategy[Piece]:
    flags = st.booleans()
    indices = st.integers(0, 7)
    simple: list[st.SearchStrategy[Piece]] = [
        st.builds(Linear, flags, flags, st.sampled_from(("", "weight", "bias")), flags, flags),
        st.builds(Linear, flags, flags),
        st.builds(Pointwise, st.sampled_from(("relu", "gelu", "tanh"))),
        st.builds(Raw, st.sampled_from(RAW_KINDS), flags),
        st.builds(RawReuse, st.sampled_from(("transposed", "same", "factor", "reshaped")), indices),
        st.builds(Again, indices),
        st.builds(Norm, st.sampled_from(("layer", "rms", "group", "batch"))),
        st.builds(Conv, flags, st.sampled_from((1, 2))),
        st.builds(
            Addmm,
            st.sampled_from((1.0, 0.5)),
            st.sampled_from((1.0, 0.0, 0.25)),
            st.sampled_from(((4,), (1,), (1, 4))),
            flags,
        ),
        st.builds(Embedding, flags),
        st.builds(Positions, st.just(()), flags),
        st.builds(QueryAttention, flags),
        st.builds(WeightNorm, flags),
        st.just(PythonFunction()),
        st.builds(Pieces, st.sampled_from(("split", "chunk", "one of two", "unbind"))),
        st.builds(InPlace, st.sampled_from(("scale", "add param", "copy product", "product"))),
        st.builds(HookOnValue, flags),
        st.builds(SecondInput, st.sampled_from(("add", "multiply"))),
        st.just(Unused()),
    ]
    if depth == 0:
        return st.one_of(simple)
    inside = st.lists(pieces(depth - 1), min_size=1, max_size=3).map(tuple)
    kinds = st.sampled_from(("residual", "checkpoint", "checkpoint", "save_on_cpu", "frozen"))
    block = st.builds(Block, kinds, inside)
    return st.one_of([*simple, block, block, st.builds(Positions, inside, flags)])


def outputs() -> st.SearchStrategy[tuple[Output, ...]]:
    last = st.builds(Output, st.just(99), st.sampled_from(("whole", "split", "reshaped")))
    any_kind = st.sampled_from(("whole", "split", "reshaped", "detached", "parameter", "number"))
    more = st.lists(st.builds(Output, st.integers(0, 6), any_kind, st.booleans()), max_size=2)
    return st.builds(lambda last, more: (*more, last), last, more)


def networks() -> st.SearchStrategy[Network]:
    # The length is drawn first, and evenly: left to themselves, most lists are short.
    lengths = st.sampled_from(range(1, 9))
    return st.builds(
        Network,
        lengths.flatmap(lambda n: st.lists(pieces(), min_size=n, max_size=n)).map(tuple),
        outputs(),
        st.sampled_from(("tuple", "list", "dict", "nested", "single")),
    )


@st.composite
def orders(draw: st.DrawFn) -> tuple[Event, ...]:
    """The events of one to three microbatches, in an order in which they can happen."""
    possible: list[Event] = [("F", mb) for mb in range(draw(st.integers(1, 3)))]
    events: list[Event] = []
    while possible:
        event = possible.pop(draw(st.integers(0, len(possible) - 1)))
        events.append(event)
        kind, mb = event
        if kind == "F":
            possible.append((draw(st.sampled_from(("I", "I", "I", "B"))), mb))
        elif kind == "I":
            possible.append(("W", mb))
    return tuple(events)


def cases() -> st.SearchStrategy[Case]:
    kinds = st.sampled_from(("leaf", "leaf", "computed", "constant"))
    hook = st.builds(ParamHook, st.sampled_from(("see", "double", "post")), st.integers(0, 20))
    hooks = st.lists(hook, max_size=3).map(tuple)
    return st.builds(Case, networks(), kinds, kinds, hooks, st.booleans(), orders())

"""Split full backwards in two, and put the halves together again."""

from collections.abc import Callable, Container, Iterator
from functools import partial

from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    MicrobatchId,
    Overlap,
    Schedule,
    Send,
    StageId,
)
from penstock.ir.action import compute_parts


def split_backward(
    schedule: Schedule, *, only: Callable[[MicrobatchId], bool] = lambda mb: True
) -> Schedule:
    """Replace every B with I and W; W comes after the sends that follow, so they do not wait.

    `only` says which microbatches are split; all by default.
    """
    return _rewrite(schedule, partial(_split, only))


def fuse_backward(schedule: Schedule) -> Schedule:
    """Replace I and W of one stage and microbatch with B where they are side by side."""
    return _rewrite(schedule, _fuse)


def join_backward(schedule: Schedule, stages: Container[StageId] | None = None) -> Schedule:
    """Replace I with B and remove W, on some stages or on all: W's work moves forward to I."""

    def join(order: tuple[Action, ...]) -> Iterator[Action]:
        for action in order:
            match action:
                case BackwardInput(stage=stage, mb=mb) if stages is None or stage in stages:
                    yield Backward(stage, mb)
                case Overlap(forward=forward, backward=BackwardInput(stage=stage, mb=mb)) if (
                    stages is None or stage in stages
                ):
                    yield Overlap(forward, Backward(stage, mb))
                case BackwardWeight(stage=stage) if stages is None or stage in stages:
                    pass
                case _:
                    yield action

    return _rewrite(schedule, join)


def split_stages(schedule: Schedule) -> frozenset[StageId]:
    """Return the stages whose backward is split."""
    return frozenset(
        part.stage
        for order in schedule.orders
        for action in order
        for part in compute_parts(action)
        if isinstance(part, BackwardInput)
    )


def _rewrite(
    schedule: Schedule, rewrite: Callable[[tuple[Action, ...]], Iterator[Action]]
) -> Schedule:
    return schedule.with_orders(map(rewrite, schedule.orders))


def _split(only: Callable[[MicrobatchId], bool], order: tuple[Action, ...]) -> Iterator[Action]:
    held_back: list[Action] = []
    for action in order:
        if not isinstance(action, Send):
            yield from held_back
            held_back = []
        match action:
            case Backward(stage=stage, mb=mb) if only(mb):
                yield BackwardInput(stage, mb)
                held_back = [BackwardWeight(stage, mb)]
            case Overlap(forward=forward, backward=Backward(stage=stage, mb=mb)) if only(mb):
                yield Overlap(forward, BackwardInput(stage, mb))
                held_back = [BackwardWeight(stage, mb)]
            case _:
                yield action
    yield from held_back


def _fuse(order: tuple[Action, ...]) -> Iterator[Action]:
    following = iter(order[1:])
    skip = False
    for action in order:
        after = next(following, None)
        if skip:
            skip = False
            continue
        fused = _fuse_pair(action, after)
        skip = fused is not None
        yield action if fused is None else fused


def _fuse_pair(action: Action, after: Action | None) -> Action | None:
    match action, after:
        case BackwardInput(stage=stage, mb=mb), BackwardWeight() if after == BackwardWeight(
            stage, mb
        ):
            return Backward(stage, mb)
        case Overlap(
            forward=forward, backward=BackwardInput(stage=stage, mb=mb)
        ), BackwardWeight() if after == BackwardWeight(stage, mb):
            return Overlap(forward, Backward(stage, mb))
        case _:
            return None

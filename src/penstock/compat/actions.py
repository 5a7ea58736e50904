"""Actions as torch.distributed.pipelining writes them, and orders that are made of them.

torch has one class for all actions, with a type in it. `str()` of an action is its cell in the
text format, which both packages share, so that text is the way from one to the other.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias

from penstock.errors import ScheduleError
from penstock.ir import Action, Schedule

_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)(OVERLAP_F_B)")
_SINGLE = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{0,9})")


class _ComputationType(str, Enum):  # noqa: UP042  # str() of a StrEnum would differ.
    """The type of an action, by its letters in the text format."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    WAIT_SEND_F = "WAIT_SEND_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_SEND_B = "WAIT_SEND_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> "_ComputationType":
        """Return the type that these letters name."""
        try:
            return _ComputationType(action)
        except ValueError as exc:
            known = ", ".join(kind.value for kind in _ComputationType)
            raise ScheduleError(
                f"{action!r} is not a type of action. Expected one of {known}."
            ) from exc


FORWARD = _ComputationType.FORWARD
BACKWARD_INPUT = _ComputationType.BACKWARD_INPUT
BACKWARD_WEIGHT = _ComputationType.BACKWARD_WEIGHT
UNSHARD = _ComputationType.UNSHARD
RESHARD = _ComputationType.RESHARD
SEND_F = _ComputationType.SEND_F
RECV_F = _ComputationType.RECV_F
WAIT_SEND_F = _ComputationType.WAIT_SEND_F
SEND_B = _ComputationType.SEND_B
RECV_B = _ComputationType.RECV_B
WAIT_SEND_B = _ComputationType.WAIT_SEND_B
FULL_BACKWARD = _ComputationType.FULL_BACKWARD
OVERLAP_F_B = _ComputationType.OVERLAP_F_B
REDUCE_GRAD = _ComputationType.REDUCE_GRAD
WAIT_REDUCE_GRAD = _ComputationType.WAIT_REDUCE_GRAD

_COMPUTES = (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP_F_B)


class _Action(NamedTuple):
    """One action of a rank; a pair of actions that run together has the stage -1."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple["_Action", ...] | None = None

    def __repr__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(repr, self.sub_actions))}){self.computation_type.value}"
        mb = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{mb}"

    def __str__(self) -> str:
        return repr(self)

    @property
    def is_compute_op(self) -> bool:
        """True for forwards, backwards and pairs of them."""
        return self.computation_type in _COMPUTES

    @staticmethod
    def from_str(action_string: str) -> "_Action | None":
        """Return the action of a cell, or None for an empty cell.

        >>> _Action.from_str("2I3")
        2I3
        """
        cell = action_string.strip()
        if not cell:
            return None
        if match := _PAIR.fullmatch(cell):
            pair = _Action.from_str(match[1]), _Action.from_str(match[2])
            return _Action(-1, OVERLAP_F_B, None, tuple(filter(None, pair)))
        if match := _SINGLE.fullmatch(cell):
            stage, kind, mb = match.groups()
            return _Action(int(stage), _ComputationType.from_str(kind), int(mb) if mb else None)
        raise ScheduleError(
            f"{cell!r} is not an action. Expected a cell such as 2F0, 1UNSHARD, 3SEND_F1 or "
            "(0F2;3B1)OVERLAP_F_B."
        )


Order: TypeAlias = dict[int, list[_Action | None]]
"""The actions of each rank; None is an idle slot."""


def as_torch_action(action: Action) -> _Action:
    """Return one of Penstock's actions as torch's."""
    found = _Action.from_str(str(action))
    assert found is not None  # Only an empty text is no action.
    return found


def as_order(schedule: Schedule) -> Order:
    """Return the orders of all ranks as torch's."""
    return {
        rank: [as_torch_action(action) for action in order]
        for rank, order in enumerate(schedule.orders)
    }


def copy_order(order: Mapping[int, Sequence[_Action | None]]) -> Order:
    """Return a copy, to find out later whether the order was changed."""
    return {rank: list(row) for rank, row in order.items()}


def read_order(filename: str) -> Order:
    """Return the orders in a CSV file, with its idle slots."""
    try:
        text = Path(filename).read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise ScheduleError(
            f"{filename} is not valid UTF-8 (byte {exc.start}). Expected a schedule in PyTorch's "
            "text format."
        ) from exc
    return {
        rank: [_Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(text.strip().splitlines())
    }


def format_order(order: Mapping[int, Sequence[_Action | None]]) -> str:
    """Return an order as CSV text: a line for each rank, an empty cell for an idle slot."""
    rows = (order[rank] for rank in sorted(order))
    return "".join(
        ",".join("" if cell is None else str(cell) for cell in row) + "\n" for row in rows
    )


def as_schedule(
    order: Mapping[int, Sequence[_Action | None]], num_ranks: int, num_microbatches: int
) -> Schedule:
    """Return the schedule that an order describes; raise an error if it does not fit."""
    if sorted(order) != list(range(num_ranks)):
        raise ScheduleError(
            f"pipeline_order has ranks {sorted(order)}. Expected an order for each of the "
            f"{num_ranks} ranks of the group, numbered from 0."
        )
    schedule = Schedule.from_csv(format_order(order))
    if schedule.num_microbatches != num_microbatches:
        raise ScheduleError(
            f"pipeline_order has {schedule.num_microbatches} microbatches, but n_microbatches is "
            f"{num_microbatches}. Expected the same number."
        )
    return schedule

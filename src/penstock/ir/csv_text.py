"""The text format: one line per rank, one cell per action, as PyTorch writes and reads it.

    0F0,0F1,,0B0,0B1
    1F0,1B0,1F1,1B1

An empty cell is an idle slot; it says nothing about the order and is dropped.
So are the cells by which torch 2.15 waits for what it has started, such as 0WAIT_REDUCE_GRAD or
0WAIT_SEND_F1, which must follow it: our runtime knows itself when to wait. `format_csv` writes them
if asked to, since torch 2.15 does not load sends and reductions without them.
A message that skips stages also names its other end: 0SEND_F1>3 goes from stage 0 to stage 3, where
it is 3RECV_F1<0. torch has no cell for this, and its loader ignores the other end: such a file
is for Penstock only. Nor does torch have a cell for recomputation, 0R1, which its loader refuses.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from penstock.errors import ScheduleError
from penstock.ir.action import (
    SHARDING_TYPES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Recompute,
    Recv,
    ReduceGrads,
    Reshard,
    Send,
    Sharding,
    SingleCompute,
    Unshard,
    compute_parts,
    parts,
)
from penstock.ir.message import Message, MicrobatchId, StageId
from penstock.ir.placement import Placement

_COMPUTES: Final[dict[str, Callable[[StageId, MicrobatchId], SingleCompute]]] = {
    "F": Forward,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
    "R": Recompute,
}
_SHARDINGS: Final[dict[str, Callable[[StageId], Sharding]]] = {
    "UNSHARD": Unshard,
    "RESHARD": Reshard,
    "REDUCE_GRAD": ReduceGrads,
}
# The offset of the stage at the other end, between neighbours.
_COMMS: Final[dict[str, int]] = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}
# Nine digits are enough for any number of stages or microbatches, and bound the numbers.
_SINGLE = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{1,9})([<>][0-9]{1,9})?")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_SHARDING = re.compile(r"([0-9]{1,9})(UNSHARD|RESHARD|REDUCE_GRAD)")
_WAIT = re.compile(r"([0-9]{1,9})WAIT_(REDUCE_GRAD|SEND_[FB][0-9]{1,9})")

_EXPECTED = (
    "Expected a cell like 0F1 (stage, kind, microbatch), where kind is one of "
    f"{', '.join([*_COMPUTES, *_COMMS])}; or a pair like (0F2;3B1)OVERLAP_F_B; or "
    f"a stage and one of {', '.join(_SHARDINGS)}; or an empty cell."
)


class Cell(NamedTuple):
    """An action and its place in the text; lines and cells are counted from 1."""

    action: Action
    line: int
    cell: int


class ParsedText(NamedTuple):
    """The orders in a text, with the placement and number of microbatches that follow from them."""

    orders: tuple[tuple[Action, ...], ...]
    placement: Placement
    num_microbatches: int


def parse_csv(text: str) -> ParsedText:
    """Read the format above; a rank holds the stages that its line names."""
    lines = [list(_read_line(row, line)) for line, row in enumerate(_read_rows(text), start=1)]
    if not lines:
        raise _error(1, 1, "the text is empty.", "Expected one line of actions for each rank.")
    holder: dict[StageId, Cell] = {}
    last_mb = 0
    for line, cells in enumerate(lines, start=1):
        if not cells:
            raise _error(
                line, 1, "the line has no action.", "Every rank holds a stage: remove the line."
            )
        for cell in cells:
            for part in parts(cell.action):
                if not isinstance(part, SHARDING_TYPES):
                    last_mb = max(last_mb, part.mb)
                first = holder.setdefault(part.stage, cell)
                if first.line != line:
                    raise _stage_on_two_lines(part.stage, first, cell)
    _check_stages_are_complete(holder)
    return ParsedText(
        orders=tuple(tuple(cell.action for cell in cells) for cells in lines),
        placement=Placement(holder[stage].line - 1 for stage in range(len(holder))),
        num_microbatches=last_mb + 1,
    )


def format_csv(orders: Iterable[Iterable[Action]], *, has_waits: bool = False) -> str:
    """Return the orders in the format above, one line for each rank, each ending with a newline.

    With `has_waits`, there is a wait for each send and each reduction, as torch 2.15 needs them.
    """
    lines = (_with_waits(order) if has_waits else map(str, order) for order in orders)
    return "".join(",".join(line) + "\n" for line in lines)


def parse_cell(cell: str) -> Action | None:
    """Return the action that `cell` names, or None if it names none.

    >>> parse_cell("2I3")
    BackwardInput(stage=2, mb=3)
    """
    if match := _SINGLE.fullmatch(cell):
        stage, kind, mb, other = match.groups()
        if kind not in _COMPUTES:
            return _parse_comm(int(stage), kind, int(mb), other)
        if other is None:
            return _COMPUTES[kind](int(stage), int(mb))
    elif match := _SHARDING.fullmatch(cell):
        return _SHARDINGS[match[2]](int(match[1]))
    elif match := _OVERLAP.fullmatch(cell):
        match parse_cell(match[1].strip()), parse_cell(match[2].strip()):
            case Forward() as forward, (Backward() | BackwardInput()) as backward:
                return Overlap(forward, backward)
    return None


def _parse_comm(stage: StageId, kind: str, mb: MicrobatchId, other: str | None) -> Action | None:
    """Return a send or receive; `other` is the other end if it is not a neighbour, such as >3."""
    if kind not in _COMMS:
        return None
    offset, is_send = _COMMS[kind], kind.startswith("SEND")
    end = stage + offset
    if other is not None:
        arrow, end = other[0], int(other[1:])
        if arrow != (">" if is_send else "<") or (end - stage) * offset < 2:
            return None
    return Send(Message(stage, end, mb)) if is_send else Recv(Message(end, stage, mb))


def _read_rows(text: str) -> list[list[str]]:
    # Spreadsheets may begin a file with a byte order mark. Quotes are left to `_unquote`, because
    # the csv module joins two lines if a quote stays open.
    unmarked = io.StringIO(text.removeprefix("\ufeff"), newline="")
    reader = csv.reader(unmarked, quoting=csv.QUOTE_NONE)
    rows: list[list[str]] = []
    try:
        rows.extend(reader)
    except csv.Error as exc:
        raise _error(len(rows) + 1, 1, f"the line cannot be read: {exc}.", _EXPECTED) from exc
    while rows and not rows[-1]:
        rows.pop()  # Empty lines at the end of a file are not ranks.
    return rows


def _read_line(row: list[str], line: int) -> Iterator[Cell]:
    started: set[Action] = set()
    """The sends and reductions that have not been waited for."""
    for number, raw in enumerate(row, start=1):
        cell = _unquote(raw.strip())
        if not cell:
            continue
        if wait := _WAIT.fullmatch(cell):
            awaited = parse_cell(wait[1] + wait[2])
            if awaited not in started:
                raise _error(
                    line,
                    number,
                    f"{cell} waits for {awaited}, which has not been started earlier on this line, "
                    "or was already waited for.",
                    "A wait comes once, after its send or reduction: move it there, or remove it.",
                )
            started.remove(awaited)
            continue
        action = parse_cell(cell)
        if action is None:
            shown = cell if len(cell) <= 40 else f"{cell[:40]}…"
            raise _error(line, number, f"{shown!r} is not an action.", _EXPECTED)
        if isinstance(action, Send | ReduceGrads):
            started.add(action)
        yield Cell(action, line, number)


def _with_waits(order: Iterable[Action]) -> Iterator[str]:
    """Yield the cells of an order, with a wait for each send and each reduction.

    No wait comes before the other rank can have received: an activation is waited for after the
    backward of its microbatch, which needs a gradient that is computed from it; all other sends at
    the end of the order. A reduction is waited for at once, as torch has one at a time.
    """
    sent: dict[Send, None] = {}
    for action in order:
        yield str(action)
        if isinstance(action, ReduceGrads):
            yield _wait_for(action)
        elif isinstance(action, Send):
            if action.message.skip is not None:
                raise ScheduleError(
                    f"{action} skips stages, for which torch has no cell. "
                    "Leave the waits out: only Penstock can run this schedule."
                )
            sent[action] = None
        elif isinstance(action, Recompute):
            raise ScheduleError(
                f"{action} runs a forward again, for which torch has no cell. "
                "Leave the waits out: only Penstock can run this schedule."
            )
        for part in compute_parts(action):
            if isinstance(part, Backward | BackwardInput):
                received = Send(Message(part.stage, part.stage + 1, part.mb))
                if received in sent:
                    del sent[received]
                    yield _wait_for(received)
    yield from map(_wait_for, sent)


def _wait_for(action: Send | ReduceGrads) -> str:
    stage = str(action.stage)
    return f"{stage}WAIT_{str(action).removeprefix(stage)}"


def _unquote(cell: str) -> str:
    """Return the cell without the quotes that some spreadsheets put around all text."""
    is_quoted = len(cell) >= 2 and cell[0] == cell[-1] == '"'
    return cell[1:-1].strip() if is_quoted else cell


def _stage_on_two_lines(stage: StageId, first: Cell, cell: Cell) -> ScheduleError:
    return _error(
        cell.line,
        cell.cell,
        f"{cell.action} is on rank {cell.line - 1}, "
        f"but {first.action} of the same stage is on rank {first.line - 1}.",
        f"All actions of a stage are on one rank: keep stage {stage} on one line.",
    )


def _check_stages_are_complete(holder: dict[StageId, Cell]) -> None:
    for stage in range(len(holder)):
        if stage not in holder:
            last = holder[max(holder)]
            raise _error(
                last.line,
                last.cell,
                f"{last.action} is of stage {max(holder)}, but stage {stage} is not on any line.",
                "Stages are numbered from 0 along the data path: leave no number out.",
            )


def _error(line: int, cell: int, wrong: str, expected: str) -> ScheduleError:
    return ScheduleError(f"line {line}, cell {cell}: {wrong}\n{expected}")

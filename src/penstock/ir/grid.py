"""Draw a schedule as text, one row per rank, one column per unit of time."""

from contextlib import suppress

from penstock.errors import ScheduleError
from penstock.ir.action import SHARDING_TYPES, Action, Overlap, is_compute, parts
from penstock.ir.message import Message
from penstock.ir.schedule import Schedule
from penstock.ir.walking import walk


def format_grid(schedule: Schedule) -> str:
    """Return the schedule as if each compute action took one unit and all others none.

    Only compute actions are shown. A dot is idle time. A rank that waits forever ends in `!` and
    the actions that it could not run.
    """
    rows = _lay_out(schedule)
    width = max((len(cell) for row in rows for cell in row), default=0)
    label = len(f"rank {len(rows) - 1}")
    return "\n".join(
        (f"{f'rank {rank}':<{label}}  " + " ".join(f"{cell:<{width}}" for cell in row)).rstrip()
        for rank, row in enumerate(rows)
    )


def _lay_out(schedule: Schedule) -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in schedule.orders]
    done = [0] * len(rows)
    available: dict[Message, int] = {}
    # A schedule that was not verified must be drawn too, to show what is wrong with it.
    with suppress(ScheduleError):
        for rank, action, needed, delivered in walk(schedule) if _is_in_range(schedule) else ():
            done[rank] += 1
            row = rows[rank]
            start = max([len(row), *(available[key] for key in needed)])
            if is_compute(action):
                row += ["."] * (start - len(row)) + [_cell(action)]
                start += 1
            available.update(dict.fromkeys(delivered, start))
    for row, order, position in zip(rows, schedule.orders, done, strict=True):
        left = [_cell(action) for action in order[position:] if is_compute(action)]
        row += ["!", *left] if left else []
    return rows


def _is_in_range(schedule: Schedule) -> bool:
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    return all(stage in stages for skip in schedule.skips for stage in skip) and all(
        part.stage in stages and (isinstance(part, SHARDING_TYPES) or part.mb in microbatches)
        for order in schedule.orders
        for action in order
        for part in parts(action)
    )


def _cell(action: Action) -> str:
    return f"{action.forward}&{action.backward}" if isinstance(action, Overlap) else str(action)

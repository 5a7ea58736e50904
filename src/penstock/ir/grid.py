"""Draws a schedule as text, one row per rank, one column per unit of time."""

from penstock.errors import ScheduleError
from penstock.ir.action import Action, Overlap, is_compute
from penstock.ir.schedule import Schedule
from penstock.ir.walk import walk


def format_grid(schedule: Schedule) -> str:
    """The schedule as if each compute action took one unit and communication none.

    A dot is idle time. A rank that waits for ever ends in `!` and what it could not run.
    """
    rows: list[list[str]] = [[] for _ in schedule.orders]
    done = [0] * len(schedule.orders)
    available: dict[int, int] = {}
    try:
        for rank, action, needed, delivered in walk(schedule):
            done[rank] += 1
            row = rows[rank]
            start = max([len(row), *(available[key] for key in needed)])
            if is_compute(action):
                row += ["."] * (start - len(row)) + [_cell(action)]
                start += 1
            available.update(dict.fromkeys(delivered, start))
    except ScheduleError:
        for row, order, position in zip(rows, schedule.orders, done, strict=True):
            left = [_cell(action) for action in order[position:] if is_compute(action)]
            row += ["!", *left] if left else []
    width = max(len(cell) for row in rows for cell in row)
    label = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {rank}':<{label}}  " + " ".join(f"{cell:<{width}}" for cell in row).rstrip()
        for rank, row in enumerate(rows)
    )


def _cell(action: Action) -> str:
    return f"{action.forward}&{action.backward}" if isinstance(action, Overlap) else str(action)

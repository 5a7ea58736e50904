"""The output of commands: tables, JSON, and a status line while they work.

A table has colours only on a terminal. rich is imported when it is needed.
"""

import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_OF_FILES = 100
_NARROWEST, _WIDEST = 20, 1000


def width() -> int:
    """Return the number of characters in a line: COLUMNS, or the terminal's, or 100."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return min(max(int(columns), _NARROWEST), _WIDEST)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _WIDTH_OF_FILES
    except (OSError, ValueError):  # Not a terminal, or not even a file.
        return _WIDTH_OF_FILES


def console(columns: int | None = None) -> "Console":
    """Return the console for drawings and tables, `columns` wide or as wide as the screen."""
    from rich.console import Console

    return Console(
        width=columns or width(),
        highlight=False,
        emoji=False,
        # With NO_COLOR alone, rich would still print bold text in bold.
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str]
) -> None:
    """Print a table; the columns named in `words` are aligned left, the others right.

    If the terminal is too narrow, the last column wraps.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(header, start=1):
        justify: Literal["left", "right"] = "left" if name in words else "right"
        table.add_column(name, justify=justify, no_wrap=number < len(header))
    for row in rows:
        table.add_row(*map(Text, row))
    screen = console()
    with screen.capture() as captured:
        screen.print(table)
    # rich pads every line with blanks.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_json(value: Any) -> None:
    """Print JSON; numbers that are not finite become null, since JSON cannot express them."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


@contextmanager
def sign_of_life(text: str) -> Iterator[None]:
    """Show a status line on a terminal; it goes to stderr, so that pipes stay clean."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status(text):
        yield


def _plain(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _plain(part) for name, part in value.items()}
        case list() | tuple():
            return [_plain(part) for part in value]
        case _:
            return value

"""The look of a lane's characters, with and without colour."""

from collections.abc import Sequence
from functools import cache

from rich.style import Style
from rich.text import Text

from penstock.draw.cells import Stretch
from penstock.draw.colours import TEXT, colour
from penstock.draw.panel import Kind

IDLE = "·"
BOTH = "&"
"""Separator of the halves of an overlap in drawings without colours."""
FAINT = Style(dim=True)
_NUMBERED = 0.75  # Bars narrower than this, in characters, are mostly invisible: no number.


def coloured(runs: Sequence[Stretch], *, num_stages: int) -> Text:
    """Draw each bar as a coloured stretch that begins with its microbatch."""
    line = Text()
    for run in runs:
        slot, width, _ = run
        styles = [paint(kind, place, num_stages) for kind, place in slot.look]
        if not styles:
            line.append(IDLE * width, FAINT)
        elif len(styles) == 1:
            line.append(_number(run).ljust(width), styles[0])
        else:
            line.append("▀" * width, split(styles[0], styles[1]))
    return line


def thin(runs: Sequence[Stretch], *, num_stages: int) -> Text:
    """Draw bars of half the height, without numbers. The halves of an overlap alternate."""
    line = Text()
    for slot, width, _ in runs:
        styles = [paint(kind, place, num_stages) for kind, place in slot.look]
        for cell in range(width):
            if styles:
                line.append("▀", Style(color=styles[cell % len(styles)].bgcolor))
            else:
                line.append(" ")
    return line


def lettered(runs: Sequence[Stretch]) -> Text:
    """Draw each bar as its kind's letter, its microbatch if it fits, and a line to its end."""
    line = Text()
    for slot, width, _ in runs:
        letters = [letter(kind, place) for kind, place in slot.look]
        if not letters:
            line.append(IDLE * width, FAINT)
            continue
        numbers = [str(bar.number) for bar in slot.bars]
        full = BOTH.join(map("".join, zip(letters, numbers, strict=True)))
        short = BOTH.join(letters)
        known = [text for text in (full, short) if len(text) <= width]
        line.append((known[0] if known else BOTH).ljust(width, "─"))
    return line


def letter(kind: Kind, place: int) -> str:
    """Return the letter of a kind: in lower case for all but the first stage of a rank."""
    return kind.value.lower() if place else kind.value


@cache
def paint(kind: Kind, place: int = 0, num_stages: int = 1) -> Style:
    """Return the style of a bar and the number on it."""
    return Style(color=TEXT, bgcolor=colour(kind, place, num_stages))


@cache
def split(upper: Style, lower: Style) -> Style:
    """Return the style of an upper half block that shows two bars of half the height."""
    return Style(color=upper.bgcolor, bgcolor=lower.bgcolor)


def _number(run: Stretch) -> str:
    """Return the microbatch if it stays apart from the next number, else a mark at the start."""
    digits = str(run.slot.bars[0].number)
    if run.exact_width < _NUMBERED:
        return ""
    if len(digits) == 1 or len(digits) < run.width:
        return digits
    return "▏" if run.width > 1 and run.exact_width > 1.5 else ""

"""The time axis above the lanes."""

from math import floor, log10

from penstock.draw.cells import Scale
from penstock.draw.panel import Panel

_APART = 10  # Least number of characters from one tick to the next.


def axis(panel: Panel, scale: Scale) -> str:
    """Return a line with ticks at round times; a tick's bar is above the time it names."""
    line = [" "] * scale.width
    step = _step(_APART * scale.slice)
    number = 0
    while (cell := scale.cell(number * step)) < scale.width:
        label = f"|{panel.time(number * step)}"
        if cell + len(label) > scale.width:
            break
        line[cell : cell + len(label)] = label
        number += 1
    return "".join(line)


def _step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power: float = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)

"""The time axis above the lanes."""

from math import floor, log10

from penstock.draw.cells import Scale
from penstock.draw.panel import Panel

_APART = 10  # Characters from a tick to the next, at least.


def axis(panel: Panel, scale: Scale) -> str:
    """A line with ticks at round times; a tick's bar is above the time it names."""
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
    """The smallest of 1, 2 and 5, or one of them with zeros behind or before, from `least` on."""
    power: float = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)

"""All algorithms that Penstock knows, by name."""

import difflib
from typing import Final

from penstock.errors import ScheduleError
from penstock.schedules.dual_pipe_v import dual_pipe_v
from penstock.schedules.forward_only import forward_only
from penstock.schedules.generator import Generator
from penstock.schedules.gpipe import gpipe
from penstock.schedules.interleaved_1f1b import interleaved_1f1b
from penstock.schedules.interleaved_ahead import interleaved_ahead
from penstock.schedules.interleaved_zero_bubble import interleaved_zero_bubble
from penstock.schedules.looped_bfs import looped_bfs
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.schedules.v_half import v_half
from penstock.schedules.v_min import v_min
from penstock.schedules.zb_h1 import zb_h1
from penstock.schedules.zb_h2 import zb_h2
from penstock.schedules.zb_v import zb_v

REGISTRY: Final[tuple[Generator, ...]] = (
    gpipe,
    one_f_one_b,
    interleaved_1f1b,
    interleaved_ahead,
    looped_bfs,
    zb_h1,
    zb_h2,
    interleaved_zero_bubble,
    zb_v,
    v_half,
    v_min,
    dual_pipe_v,
    forward_only,
)
"""All algorithms; `get` finds one by its name."""


def names() -> list[str]:
    """Return the names of all algorithms.

    >>> names()[:3]
    ['GPipe', '1F1B', 'Interleaved1F1B']
    """
    return [generator.name for generator in REGISTRY]


def get(name: str) -> Generator:
    """Return the algorithm of that name; case, hyphens, underscores and blanks do not matter.

    The names of torch's classes work too.

    >>> get("zb-v") is get("ScheduleZBVZeroBubble")
    True
    """
    by_key = {
        _normalise(known): generator
        for generator in REGISTRY
        for known in (generator.name, *generator.aliases)
    }
    found = by_key.get(_normalise(name))
    if found is None:
        close = difflib.get_close_matches(_normalise(name), by_key, n=1, cutoff=0.5)
        hint = f"Did you mean {by_key[close[0]].name}? " if close else ""
        raise ScheduleError(
            f"There is no schedule named {name!r}. {hint}The known ones are {', '.join(names())}."
        )
    return found


def _normalise(name: str) -> str:
    letters = "".join(character for character in name.lower() if character not in "-_ ")
    return letters.removeprefix("schedule")

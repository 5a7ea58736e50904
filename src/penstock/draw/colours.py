"""One colour for each kind of bar, the same in every drawing.

The blue is one of Okabe and Ito's set, which was chosen for people with any colour vision. The
others are lighter versions of its vermilion, orange and bluish green, so that text on them has a
contrast of at least 5.9 rather than 4.6. tests/draw/test_colours.py checks this, and that people
with each kind of colour blindness can tell them apart. Recomputation is a pale cyan, near the blue
of forwards. Blue and green come closest, for the few
who lack blue cones. The later a stage is among those of its rank, the paler it is.
Gathers and reductions have a lane of their own, so their colours need only differ from each other.
"""

from penstock.draw.panel import Kind

_COLOURS = {
    Kind.FORWARD: (0x56, 0xB4, 0xE9),
    Kind.BACKWARD: (0xE0, 0x7B, 0x39),
    Kind.BACKWARD_INPUT: (0xF0, 0xB4, 0x29),
    Kind.BACKWARD_WEIGHT: (0x2F, 0xB3, 0x8A),
    Kind.RECOMPUTE: (0x96, 0xF0, 0xF0),
    Kind.GATHER: (0xD9, 0x8C, 0xB8),
    Kind.REDUCE: (0xB8, 0xC9, 0x4A),
}
TEXT = "#14181d"
"""The colour of text on any of the colours."""
_PALEST = 0.6  # Share of white in the colour of the last of many stages.


def colour(kind: Kind, place: int = 0, num_stages: int = 1) -> str:
    """Return `#rrggbb` for the stage at `place` among the `num_stages` of its rank."""
    white = _PALEST * place / max(num_stages, 2)
    mixed = (round(part + (255 - part) * white) for part in _COLOURS[kind])
    return "#" + "".join(f"{part:02x}" for part in mixed)

"""Colours of the kinds of compute: distinct, and readable under text."""

import re
from itertools import combinations

from penstock.draw.colours import TEXT, colour
from penstock.draw.panel import Kind


def test_later_stages_are_paler_but_not_white() -> None:
    for kind in Kind:
        shades = [_light(colour(kind, place, 4)) for place in range(4)]
        assert shades == sorted(set(shades))
        assert _light("#ffffff") > shades[-1]


def test_text_can_be_read_on_every_colour() -> None:
    # 4.5 is what the guidelines for accessible pages ask of small text.
    for kind, place in [(kind, place) for kind in Kind for place in range(3)]:
        ground = colour(kind, place, 3)
        assert re.fullmatch("#[0-9a-f]{6}", ground)
        assert (_light(ground) + 0.05) / (_light(TEXT) + 0.05) >= 4.5


def test_no_two_kinds_have_a_shade_in_common() -> None:
    shades = [{colour(kind, place, 4) for place in range(4)} for kind in Kind]
    assert all(not one & other for one, other in combinations(shades, 2))


def _light(name: str) -> float:
    """How light a colour is to the eye, from 0 to 1."""
    parts = [int(name[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

"""Colours of the kinds of compute: distinct, and readable under text."""

import re
from collections.abc import Sequence
from itertools import combinations
from math import dist
from operator import mul

import pytest

from penstock.draw.colours import TEXT, colour
from penstock.draw.panel import Kind

# Gathers and reductions are on lanes of their own.
COLLECTIVES = [Kind.GATHER, Kind.REDUCE]
COMPUTES = [kind for kind in Kind if kind not in COLLECTIVES]
Rows = tuple[tuple[float, float, float], ...]
# How light looks without one of the three kinds of cones: Machado, Oliveira and Fernandes,
# doi:10.1109/TVCG.2009.113, severity 1.
BLINDNESS = {
    "red": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "green": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "blue": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}


def test_later_stages_are_paler_but_not_white() -> None:
    for kind in Kind:
        shades = [_light(colour(kind, place, 4)) for place in range(4)]
        assert shades == sorted(set(shades))
        assert _light("#ffffff") > shades[-1]


def test_text_can_be_read_on_every_colour() -> None:
    # The guidelines for accessible pages ask for 4.5 for small text.
    for kind, place in [(kind, place) for kind in Kind for place in range(3)]:
        ground = colour(kind, place, 3)
        assert re.fullmatch("#[0-9a-f]{6}", ground)
        assert (_light(ground) + 0.05) / (_light(TEXT) + 0.05) >= 5.9


def test_no_two_kinds_have_a_shade_in_common() -> None:
    shades = [{colour(kind, place, 4) for place in range(4)} for kind in Kind]
    assert all(not one & other for one, other in combinations(shades, 2))


@pytest.mark.parametrize(("cone", "least"), [("red", 20), ("green", 20), ("blue", 10)])
def test_kinds_can_be_told_apart_without_one_kind_of_cones(cone: str, least: float) -> None:
    # 2.3 is a difference that can just be seen.
    for lane in (COMPUTES, COLLECTIVES):
        seen = [_seen(colour(kind), BLINDNESS[cone]) for kind in lane]
        assert min(dist(one, other) for one, other in combinations(seen, 2)) > least


def _light(name: str) -> float:
    """How light a colour is to the eye, from 0 to 1."""
    linear = _linear(name)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _linear(name: str) -> list[float]:
    """The red, green and blue light of a colour, each from 0 to 1."""
    parts = [int(name[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def _seen(name: str, blindness: Rows) -> tuple[float, float, float]:
    """The colour as L*a*b*, of which equal distances look about equally far apart."""
    light = [min(max(part, 0.0), 1.0) for part in _times(blindness, _linear(name))]
    to_xyz = ((0.4339, 0.3763, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116
        for part in _times(to_xyz, light)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _times(rows: Rows, values: Sequence[float]) -> list[float]:
    return [sum(map(mul, row, values)) for row in rows]

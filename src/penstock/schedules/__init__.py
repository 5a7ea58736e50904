"""Algorithms that make schedules, one file each."""

from penstock.schedules.generator import (
    Bubble,
    Generator,
    Orders,
    Shape,
    Times,
    linear,
    loop,
    v_shape,
)
from penstock.schedules.registry import REGISTRY, get, names

__all__ = [
    "REGISTRY",
    "Bubble",
    "Generator",
    "Orders",
    "Shape",
    "Times",
    "get",
    "linear",
    "loop",
    "names",
    "v_shape",
]

"""Algorithms that make schedules, one file each."""

from penstock.schedules.base import (
    Bubble,
    Generator,
    Orders,
    Shape,
    Times,
    linear,
    loop,
    there_and_back,
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
    "there_and_back",
]

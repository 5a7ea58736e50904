"""Times and amounts of memory as text with units."""

from typing import Literal

TimeUnit = Literal["", "s"]
MemoryUnit = Literal["", "bytes"]


def in_time(value: float, unit: TimeUnit) -> str:
    """Return a time as text with its unit."""
    if unit == "":
        return f"{value:.5g}"
    for factor, name in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 1 or value == 0:
            return f"{value * factor:.4g} {name}"
    return f"{value * 1e6:.4g} µs"


def in_memory(value: float, unit: MemoryUnit) -> str:
    """Return an amount of memory as text with its unit."""
    if unit == "":
        return f"{value:.5g}"
    for exponent, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**exponent:
            return f"{value / 1024**exponent:.4g} {name}"
    return f"{value:.4g} B"

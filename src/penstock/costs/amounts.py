"""Numbers as users type them: amounts of memory with units, and lists of numbers."""

import math
import re
from typing import Final

from penstock.errors import OptionError

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
LARGEST_AMOUNT = 1e15  # Sums of larger amounts may exceed the largest float.
_AMOUNT = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)")


def to_amount(option: str, text: str) -> float:
    """Return a number above 0 from a text that may end in a unit of memory.

    >>> to_amount("--memory", "1.5 KiB")
    1536.0
    """
    match = _AMOUNT.fullmatch(text.strip().lower())
    is_known = match is not None and match[2] in _UNITS
    amount = _to_number(match[1]) * _UNITS[match[2]] if match and is_known else math.nan
    if not 0 < amount <= LARGEST_AMOUNT:
        raise OptionError(
            f"{option} is {shortened(text)!r}. Expected a number above 0, up to "
            f"{LARGEST_AMOUNT:g}, with or without a unit: 4 or 8GiB."
        )
    return float(amount)


def shortened(text: str) -> str:
    """Return the text, cut off if it is long."""
    return text if len(text) <= 40 else text[:37] + "..."


def to_caps(text: str | None, *, in_microbatches: bool) -> float | tuple[float, ...] | None:
    """Return the cap of a rank: one amount for all ranks, or one for each, separated by commas."""
    if text is None:
        return None
    parts = text.split(",")
    caps = tuple(to_memory("--memory", part, in_microbatches=in_microbatches) for part in parts)
    return caps[0] if len(caps) == 1 else caps


def to_memory(option: str, text: str, *, in_microbatches: bool) -> float:
    """Return an amount above 0; it has no unit if memory is in microbatches."""
    amount = to_amount(option, text)
    if in_microbatches and text.strip()[-1:].isalpha():
        raise OptionError(
            f"{option} is {text!r}, but the bytes that a microbatch holds are unknown "
            "without a file of costs. "
            "Expected a number of microbatches, such as 4; or give --costs FILE."
        )
    return amount


def to_counts(option: str, text: str | None) -> list[int] | None:
    """Return whole numbers that are separated by commas.

    >>> to_counts("--microbatches", "8,16")
    [8, 16]
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 15 and int(part) > 0 for part in parts):
        raise OptionError(
            f"{option} is {shortened(text)!r}. Expected whole numbers above 0, separated by "
            "commas: 8,16. They have at most 15 digits."
        )
    return [int(part) for part in parts]


def to_times(text: str) -> tuple[float, float, float] | None:
    """Return three numbers that are separated by commas, or None if the text is anything else."""
    numbers = [_to_number(part) for part in text.split(",")]
    if len(numbers) != 3 or any(math.isnan(number) for number in numbers):
        return None
    return numbers[0], numbers[1], numbers[2]


def _to_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan

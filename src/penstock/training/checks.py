"""Checks of single options."""

import math

from penstock.errors import OptionError

_LARGEST_SCHEDULE = 200_000


def check_count(name: str, value: int, *, least: int = 1) -> None:
    """Raise an error unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or value < least:
        raise OptionError(f"--{name} is {value!r}. Expected a whole number, at least {least}.")


def check_amount(name: str, value: float, *, such_as: str, may_be_zero: bool = False) -> None:
    """Raise an error unless `value` is a finite number above 0, or 0 where that may be."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
        least = "of at least 0" if may_be_zero else "above 0"
        raise OptionError(f"--{name} is {value}. Expected a number {least}, such as {such_as}.")


def check_size(num_ranks: int, num_microbatches: int) -> None:
    """Raise an error if a schedule would have too many actions to make or draw."""
    if num_ranks * num_microbatches > _LARGEST_SCHEDULE:
        raise OptionError(
            f"--ranks is {num_ranks} and --microbatches {num_microbatches}. Expected a product of "
            f"at most {_LARGEST_SCHEDULE:,}: a larger schedule takes minutes, and gigabytes."
        )

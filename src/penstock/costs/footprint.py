"""What activations take up."""

from collections.abc import Sequence
from typing import Protocol


class Footprint(Protocol):
    """What one microbatch holds of each stage; a `CostTable` is one."""

    @property
    def after_forward(self) -> Sequence[float]:
        """From the start of its forward to the end of its I or B."""

    @property
    def after_input(self) -> Sequence[float]:
        """From the end of its I to the end of its W."""

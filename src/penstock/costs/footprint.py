"""The memory of activations and gathered parameters."""

from collections.abc import Sequence
from typing import Protocol


class Footprint(Protocol):
    """The memory that each stage holds; a `CostTable` is one."""

    @property
    def after_forward(self) -> Sequence[float]:
        """The memory of a microbatch from the start of its forward to the end of its I or B."""

    @property
    def after_input(self) -> Sequence[float]:
        """The memory of a microbatch from the end of its I to the end of its W."""

    @property
    def gathered(self) -> Sequence[float]:
        """The memory of parameters from the start of their gather until they are freed."""

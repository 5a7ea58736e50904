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
    def during_forward(self) -> Sequence[float]:
        """The most memory that F needs at any moment beyond what its rank held before it."""

    @property
    def during_input(self) -> Sequence[float]:
        """The same for I."""

    @property
    def during_weight(self) -> Sequence[float]:
        """The same for W."""

    @property
    def during_backward(self) -> Sequence[float]:
        """The same for B."""

    @property
    def after_dropping(self) -> Sequence[float]:
        """The memory of a microbatch from the start of an F that is recomputed to its R."""

    @property
    def during_dropping(self) -> Sequence[float]:
        """The most memory that an F needs which is recomputed, so that it drops its values."""

    @property
    def during_recompute(self) -> Sequence[float]:
        """The same for R."""

    @property
    def gathered(self) -> Sequence[float]:
        """The memory of parameters from the start of their gather until they are freed."""

    @property
    def memory_scale(self) -> Sequence[float]:
        """By microbatch: the factor of all of this, gathers excepted; empty if all are alike."""

    @property
    def num_microbatches(self) -> int | None:
        """The number of microbatches that have scales; None if all are alike, however many."""

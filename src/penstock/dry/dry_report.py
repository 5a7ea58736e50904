"""What a dry run found: the memory and messages of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.costs.units import in_memory
from penstock.ir import Rank, StageId


class Traffic(NamedTuple):
    """What a rank sends to another rank in a step, or receives from it.

    Gradients of tied parameters, which are exchanged at the end, count as bytes only.
    """

    num_messages: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DryRank:
    """One rank of a dry run."""

    rank: Rank
    stages: tuple[StageId, ...]
    num_parameters: int
    parameter_bytes: int
    """The bytes of its parameters and buffers."""
    gradient_bytes: int
    optimizer_bytes: int
    """The bytes that the optimizer keeps after a step."""
    activation_bytes: int
    """The most that it holds in a step besides: activations, messages, what actions need."""
    step_bytes: int
    """The most that activations, messages and gradients take at one time."""
    num_actions: int
    """The number of computes in its order; an overlap counts once."""
    sent: Mapping[Rank, Traffic]
    received: Mapping[Rank, Traffic]

    @property
    def peak_bytes(self) -> int:
        """The most that it holds at any time of a step."""
        return self.parameter_bytes + self.optimizer_bytes + self.step_bytes

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
        }
        listed = ", ".join(f"{name} {in_memory(size, 'bytes')}" for name, size in parts.items())
        return f"rank {self.rank}: {in_memory(self.peak_bytes, 'bytes')} ({listed})"


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of `penstock.dry_run`; `print` shows what was found, rank by rank."""

    ranks: tuple[DryRank, ...]
    """The ranks whose step was run, the heaviest first unless they were given."""
    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_messages: int
    """The messages of all ranks in a step."""
    message_bytes: int

    @property
    def fullest(self) -> DryRank:
        """The rank that holds the most, of those that were run."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def proven(self) -> str:
        """What holds for all ranks, in words."""
        run = ", ".join(str(rank.rank) for rank in self.ranks)
        which = f"rank {run}" if len(self.ranks) == 1 else f"ranks {run}"
        return (
            f"All {self.num_ranks} ranks match: {self.num_messages} messages of "
            f"{in_memory(self.message_bytes, 'bytes')} in a step, each sent once and awaited once; "
            f"no ranks wait for each other in a circle. A step of {which} was run."
        )

    def __str__(self) -> str:
        return "\n".join([*map(str, self.ranks), self.proven])

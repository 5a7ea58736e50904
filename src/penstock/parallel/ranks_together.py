"""All ranks of a model, in all of its pipelines, when they write or read a folder together."""

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from penstock.comm import DryGroup, LocalGroup
from penstock.comm.pipelines_together import Peers
from penstock.runtime import Pipeline
from penstock.stage import Group


@dataclass(frozen=True, slots=True)
class RanksTogether:
    """The ranks of this rank's pipeline, and those that hold its stages in other pipelines."""

    pipeline: Pipeline
    peers: Peers

    @property
    def group(self) -> Group:
        """The ranks of this rank's pipeline."""
        group = next(iter(self.pipeline.stages.values())).group
        assert not isinstance(group, DryGroup)  # Its stages are not made by parallelize.
        return group

    @property
    def rank(self) -> int:
        """This rank's number in its pipeline."""
        return next(iter(self.pipeline.stages.values())).group_rank

    @property
    def is_writer(self) -> bool:
        """True on one rank of those that hold the same stages, or shards of them."""
        return all(dist.get_rank(group) == 0 for group in self.peers.groups)

    @property
    def is_first(self) -> bool:
        """True on one rank of all."""
        return self.is_writer and self.rank == 0

    @property
    def are_threads(self) -> bool:
        """True if the ranks are threads of one process."""
        return isinstance(self.group, LocalGroup)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks. All of them must call it.

        `what` says what they gather for, in error messages.
        """
        found = self.pipeline.gather(value, what)
        return [value for row in self.peers.gather(found, what) for value in row]

    def first_problem(self, error: BaseException | None, what: str) -> str:
        """Return the first error of any rank, in one line, or "". All ranks must call it."""
        return next(filter(None, self.gather(describe_error(error), what)), "")

    def processes(self) -> list[int] | None:
        """Return the ranks among all processes; None if there are others in between.

        That is so if the mesh of several pipelines has only some of the processes.
        """
        group = self.group
        assert not isinstance(group, LocalGroup)  # Threads have no numbers among processes.
        held = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if not self.peers:
            return held
        num_pipelines = math.prod(map(dist.get_world_size, self.peers.groups))
        everyone = list(range(dist.get_world_size()))
        return everyone if len(held) * num_pipelines == len(everyone) else None


def describe_error(error: BaseException | None) -> str:
    """Return an error in one line; nothing if there is none."""
    if error is None:
        return ""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"

"""The replicas of a pipeline: whose batches count in the mean of a step, and who computes along."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm import check_agreement
from penstock.comm.pipelines_together import Peers
from penstock.ir import StageId
from penstock.microbatches.loss_weights import average_over_replicas_, sum_over_replicas
from penstock.runtime.pipeline_checks import check_same_replicas
from penstock.stage import PipelineStage
from penstock.stage.stage_checks import ranks_of


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a pipeline, as the stages of this rank know them."""

    stages: Mapping[StageId, PipelineStage]
    given: dist.ProcessGroup | None
    """The group that the caller named, if any: the ranks of the last stage in each replica."""
    device: torch.device
    timeout_s: float

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks that hold the last stage of each replica, by dimension of their mesh.

        Only the rank of the last stage may ask.
        """
        last = self.stages[max(self.stages)]
        last.refresh()  # It may have been wrapped since the last step.
        if self.given is None:
            return last.replica_groups
        if averaging := last.known_replica_groups:
            check_same_replicas(self.given, averaging)
        return (self.given,)

    def sum_over(self, totals: Sequence[float]) -> tuple[Sequence[float], int]:
        """Return the sums of all replicas' totals, and how many replicas there are."""
        num_replicas = 1
        for group in self.groups:
            totals = sum_over_replicas(totals, group, self.device, self.timeout_s)
            num_replicas *= dist.get_world_size(group)
        return totals, num_replicas

    def average_(self, loss: Tensor) -> None:
        """Put the mean of the losses of all replicas into a tensor; each must call it."""
        for group in self.groups:
            average_over_replicas_(loss, group, self.timeout_s)

    def find_peers(self) -> Peers:
        """Return the ranks that take part in collectives of this rank's stages."""
        groups = [group for stage in self.stages.values() for group in stage.peer_groups]
        if self.given is not None and dist.get_rank(self.given) >= 0:
            groups.append(self.given)
        return Peers.of(groups, self.device, self.timeout_s)

    def check_recomputed(self) -> None:
        """Raise an error if ranks that compute a stage together recompute different parts of it.

        Each would wait for collectives that the others do not run. All of them must call it. Ranks
        that name no parts do not ask: others that wait for them in vain say so at the deadline. A
        group with other ranks of this pipeline does not count: those hold other stages.
        """
        if not any(stage.recomputed for stage in self.stages.values()):
            return
        groups = [
            group
            for stage in self.stages.values()
            for group in stage.forward_groups
            if {dist.get_rank()} == {*ranks_of(group)} & {dist.get_rank(), *ranks_of(stage.group)}
        ]
        peers = Peers.of(groups, self.device, self.timeout_s)
        parts = {
            f"stage {index}": sorted(stage.recomputed) or "the whole stage"
            for index, stage in self.stages.items()
        }
        check_agreement(peers.gather({"recomputed": parts}, "the first step"), "pipeline")

"""What ranks tell each other of their stages when they first meet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.ir import StageId
from penstock.runtime.messages.skips import RankSkips
from penstock.runtime.tied_parameters import Claim, claim
from penstock.stage import PipelineStage


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank was given."""

    named: dict[str, Any]
    """What must be the same on all ranks, by the name that users know it by."""
    held: list[StageId]
    is_dynamic: bool
    """Whether the shapes of a stage may change with every microbatch."""
    is_reduced: bool
    """Whether the gradients of a stage are averaged over replicas."""
    claims: list[Claim]
    """The parameters that are tied to those of other stages."""
    skips: RankSkips

    @classmethod
    def of(cls, stages: Mapping[StageId, PipelineStage], named: dict[str, Any]) -> "RankFacts":
        """Collect the facts of the stages that a rank holds."""
        return cls(
            named=named,
            held=sorted(stages),
            is_dynamic=any(stage.dynamic_shapes for stage in stages.values()),
            is_reduced=any(stage.is_reduced for stage in stages.values()),
            claims=claim(stages),
            skips=RankSkips.of(stages.values()),
        )

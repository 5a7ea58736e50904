"""What ranks tell each other of their stages when they first meet, and whether they agree."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import AgreementError
from penstock.ir import Schedule, Skip, StageId
from penstock.runtime.tied_parameters import Claim, claim
from penstock.stage import PipelineStage


@dataclass(frozen=True, slots=True)
class RankSkips:
    """What the stages of one rank send past others, and what they take: how many values."""

    sent: dict[Skip, int]
    taken: dict[Skip, int]

    @classmethod
    def of(cls, stages: Iterable[PipelineStage]) -> "RankSkips":
        held = list(stages)
        return cls(
            {Skip(s.stage_index, to): count for s in held for to, count in s.skips_out.items()},
            {Skip(at, s.stage_index): count for s in held for at, count in s.skips_in.items()},
        )

    @property
    def all(self) -> set[Skip]:
        return {*self.sent, *self.taken}


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


def check_skips(given: Sequence[RankSkips], schedule: Schedule) -> frozenset[Skip]:
    """Return the skips of all ranks; raises if two ends, or the schedule, do not agree on them.

    `given` has what the stages of each rank send and take.
    """
    ranks = schedule.placement.ranks
    found = frozenset(skip for known in given for skip in known.all)
    for skip in sorted(found):
        source, target = skip
        sent = given[ranks[source]].sent.get(skip, 0)
        taken = given[ranks[target]].taken.get(skip, 0)
        if sent != taken:
            raise AgreementError(
                f"stage {source} on rank {ranks[source]} sends {sent} values to stage "
                f"{target}, but stage {target} on rank {ranks[target]} takes {taken} from it. "
                "Expected the same number: give skips_out and skips_in of one cut."
            )
    for source, target in sorted(schedule.skips - found):
        raise AgreementError(
            f"the schedule sends values from stage {source} to stage {target}, but no stage was "
            "made with such skips. Leave its sends out, with remove_comms: they are added for the "
            "skips that there are."
        )
    return found

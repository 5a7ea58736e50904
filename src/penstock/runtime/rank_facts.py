"""Facts about their stages that ranks exchange when they first meet, and checks of them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import AgreementError
from penstock.ir import LazyOrders, Rank, Schedule, Skip, StageId
from penstock.passes.sends_and_skips import flow_of_sends
from penstock.runtime.tied_parameters import Claim, claim
from penstock.stage import PipelineStage


@dataclass(frozen=True, slots=True)
class RankSkips:
    """The skips of one rank's stages: how many values they send, and how many they take."""

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
    """Facts about the pipeline and stages that one rank was given."""

    named: dict[str, Any]
    """Values that must be the same on all ranks, by the names that users know."""
    held: list[StageId]
    is_dynamic: bool
    """True if the shapes of a stage may change with every microbatch."""
    is_reduced: bool
    """True if the gradients of a stage are averaged over replicas."""
    claims: list[Claim]
    """The parameters that are tied to those of other stages."""
    skips: RankSkips
    orders: dict[Rank, str]
    """Digests of its own order and of those of its partners, if it knows only these."""

    @classmethod
    def of(
        cls,
        stages: Mapping[StageId, PipelineStage],
        named: dict[str, Any],
        orders: dict[Rank, str],
    ) -> "RankFacts":
        """Collect the facts of the stages that a rank holds."""
        return cls(
            orders=orders,
            named=named,
            held=sorted(stages),
            is_dynamic=any(stage.dynamic_shapes for stage in stages.values()),
            is_reduced=any(stage.is_reduced for stage in stages.values()),
            claims=claim(stages),
            skips=RankSkips.of(stages.values()),
        )


def digest_orders(schedule: Schedule, rank: Rank, skips: Iterable[Skip]) -> dict[Rank, str]:
    """Return digests of the orders and stamps of `rank` and of its partners.

    `skips` are those of its own stages; their other ends are among the partners.
    """
    orders = schedule.orders
    assert isinstance(orders, LazyOrders)
    known = [rank, *flow_of_sends(schedule, skips).partners(rank)]
    return {other: _digest([*orders[other], *orders.stamps_of(other)]) for other in known}


def describe_part(schedule: Schedule) -> str:
    """Return what ranks must agree on if each knows only its part, apart from the orders."""
    return (
        f"placement {_digest(schedule.placement.ranks)}, {schedule.num_microbatches} microbatches"
    )


def describe_whole(schedule: Schedule) -> str:
    """Return what ranks must agree on if each knows all orders."""
    return f"{schedule!r} with orders {_digest(schedule.to_csv().splitlines())}"


def have_same_orders(ranks: Sequence[RankFacts]) -> bool:
    """Return whether each rank runs the order that its partners expect of it."""
    return all(
        digest == ranks[other].orders.get(other)
        for facts in ranks
        for other, digest in facts.orders.items()
    )


def _digest(values: Iterable[Any]) -> str:
    return hashlib.sha256(",".join(map(str, values)).encode()).hexdigest()[:8]


def check_skips(given: Sequence[RankSkips], schedule: Schedule) -> frozenset[Skip]:
    """Return the skips of all ranks; raise an error if two ends, or the schedule, disagree.

    `given` has the skips of each rank's stages.
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
                "Expected the same number: give skips_out and skips_in of the same cut."
            )
    for source, target in sorted(schedule.skips - found):
        raise AgreementError(
            f"the schedule sends values from stage {source} to stage {target}, but no stage was "
            "made with this skip. Remove the schedule's sends with remove_comms: the pipeline adds "
            "those for the skips that its stages have."
        )
    return found

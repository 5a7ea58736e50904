"""When the activations of a rank are held along its order, and which of them can share a slot."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import itemgetter
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeVar

from penstock.compat.actions import (
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    _Action,
)
from penstock.compat.schedule_kinds import PipelineScheduleMulti, _PipelineScheduleRuntime
from penstock.errors import ScheduleError
from penstock.ir import MicrobatchId, Rank, StageId

Granularity: TypeAlias = Literal["microbatch", "stage_microbatch"]
Key: TypeAlias = tuple[StageId, MicrobatchId]
Lifetime: TypeAlias = tuple[int, int]
"""The first and the last place of a rank's order at which an activation is held."""
_K = TypeVar("_K")


@dataclass(frozen=True)
class PipelineActivationLiveness:
    """The slots that the activations of a rank's stages need, if those that end are used again.

    An activation is held from its forward to its full or weight backward, both included. With the
    granularity "microbatch", all chosen stages of a microbatch have one slot together.
    """

    pp_rank: Rank
    granularity: Granularity
    stage_indices: tuple[StageId, ...]
    num_microbatches: int
    slot_by_stage_and_microbatch: Mapping[Key, int]
    num_slots: int
    _activation_lifetime_by_stage_and_microbatch: Mapping[Key, Lifetime] = field(repr=False)

    def slot_for(self, stage_index: StageId, microbatch_index: MicrobatchId) -> int:
        """Return the slot of an activation."""
        self._check(stage_index, microbatch_index)
        return self.slot_by_stage_and_microbatch[stage_index, microbatch_index]

    def get_activation_lifetime(
        self, stage_index: StageId, microbatch_index: MicrobatchId
    ) -> Lifetime:
        """Return the first and the last place of the rank's order at which it is held."""
        self._check(stage_index, microbatch_index)
        return self._activation_lifetime_by_stage_and_microbatch[stage_index, microbatch_index]

    def _check(self, stage: StageId, mb: MicrobatchId) -> None:
        if (stage, mb) not in self.slot_by_stage_and_microbatch:
            raise ScheduleError(
                f"microbatch {mb} of stage {stage} was not analysed. Expected stages among "
                f"{self.stage_indices} and microbatches from 0 to {self.num_microbatches - 1}."
            )


def analyze_pipeline_activation_liveness(
    schedule: PipelineScheduleMulti,
    *,
    pp_rank: Rank,
    stage_indices: Sequence[StageId],
    granularity: Granularity,
) -> PipelineActivationLiveness:
    """Find out when the activations of a rank's stages are held, and which can share a slot.

    Places are those in `pipeline_order_with_comms` of the rank, or in `pipeline_order` where the
    schedule's class has no messages.
    """
    if granularity not in ("microbatch", "stage_microbatch"):
        raise ScheduleError(
            f'granularity is {granularity!r}. Expected "microbatch" or "stage_microbatch".'
        )
    stages, num_microbatches = tuple(stage_indices), schedule._n_microbatches
    if not stages or len(set(stages)) != len(stages):
        raise ScheduleError(
            f"stage_indices is {stages}. Expected at least one stage of the rank, each once."
        )
    held = schedule.schedule.placement  # Also checks the order, which clients may have changed.
    if not 0 <= pp_rank < held.num_ranks:
        raise ScheduleError(
            f"pp_rank is {pp_rank}. Expected a rank of the pipeline, from 0 to "
            f"{held.num_ranks - 1}."
        )
    has_comms = isinstance(schedule, _PipelineScheduleRuntime)
    order = (schedule.pipeline_order_with_comms if has_comms else schedule.pipeline_order)[pp_rank]
    keys = sorted(product(stages, range(num_microbatches)))
    lifetimes = _lifetimes(order, keys, pp_rank)
    if granularity == "microbatch":
        lifetimes = {
            (stage, mb): (
                min(lifetimes[other, mb][0] for other in stages),
                max(lifetimes[other, mb][1] for other in stages),
            )
            for stage, mb in keys
        }
        of_first, num_slots = _share(
            {mb: lifetimes[stages[0], mb] for mb in range(num_microbatches)}
        )
        slots = {(stage, mb): of_first[mb] for stage, mb in keys}
    else:
        slots, num_slots = _share(lifetimes)
    return PipelineActivationLiveness(
        pp_rank,
        granularity,
        stages,
        num_microbatches,
        MappingProxyType({key: slots[key] for key in keys}),
        num_slots,
        MappingProxyType(lifetimes),
    )


def _lifetimes(
    order: Iterable[_Action | None], keys: Sequence[Key], rank: Rank
) -> dict[Key, Lifetime]:
    """Return the places between which activations are held, in the order of `keys`."""
    starts: dict[Key, int] = {}
    ends: dict[Key, int] = {}
    for place, cell in enumerate(order):
        for action in () if cell is None else cell.sub_actions or (cell,):
            if action.microbatch_index is None:
                continue
            key = action.stage_index, action.microbatch_index
            if action.computation_type is FORWARD:
                starts[key] = place
            elif action.computation_type in (FULL_BACKWARD, BACKWARD_WEIGHT):
                ends[key] = place
    for stage, mb in keys:
        if (stage, mb) not in starts or (stage, mb) not in ends:
            raise ScheduleError(
                f"rank {rank} has no forward and backward of microbatch {mb} on stage {stage}. "
                "Expected stages of this rank, in a schedule that trains."
            )
    return {key: (starts[key], ends[key]) for key in keys}


def _share(lifetimes: Mapping[_K, Lifetime]) -> tuple[dict[_K, int], int]:
    """Return the slot of each key, the first that is free when it begins, and their number."""
    slots: dict[_K, int] = {}
    held_until: list[int] = []
    for key, (start, end) in sorted(lifetimes.items(), key=itemgetter(1)):
        slot = next((n for n, until in enumerate(held_until) if until < start), len(held_until))
        held_until[slot : slot + 1] = [end]
        slots[key] = slot
    return slots, len(held_until)

"""Checks of a pipeline's arguments, before anything runs."""

import math
from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock import schedules
from penstock.errors import GradientError, StageError, StepError
from penstock.ir import Rank, Schedule, StageId
from penstock.runtime.auto.auto_value import check_share
from penstock.runtime.auto.pilot import AbstractPilot
from penstock.runtime.step_settings import LossFn, Settings
from penstock.stage import PipelineStage
from penstock.stage.stage_checks import as_process_group

_LONGEST_TIMEOUT_S = 365 * 24 * 3600


def as_schedule(
    schedule: Schedule | str, stages: list[PipelineStage], num_microbatches: int | None
) -> Schedule:
    """Return the schedule itself, or the one with that name for these stages; not verified."""
    if isinstance(schedule, str):
        if num_microbatches is None:
            raise StageError(
                f"schedule is the name {schedule!r}, which does not say how many microbatches "
                "there are. Give num_microbatches too, or a Schedule."
            )
        generator = schedules.get(schedule)
        return generator(
            num_ranks=stages[0].group_size,
            num_microbatches=num_microbatches,
            stages_per_rank=len(stages),
        )
    if not isinstance(schedule, Schedule):
        raise StageError(
            f"schedule is {schedule!r}. Expected a penstock.Schedule, or the name of one with "
            "num_microbatches."
        )
    if num_microbatches not in (None, schedule.num_microbatches):
        raise StageError(
            f"num_microbatches is {num_microbatches}, but the schedule has "
            f"{schedule.num_microbatches}. Leave it out, or make the schedule for that number."
        )
    return schedule


def check_count(num_microbatches: int | None) -> int:
    """Return the number of microbatches; raise an error if it is not valid."""
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise StageError(
            f"num_microbatches is {num_microbatches!r}. Expected a whole number, at least 1."
        )
    return num_microbatches


def check_slow_when(
    slow_when: float | None, plan: Schedule | AbstractPilot, *, has_backward: bool
) -> float | None:
    """Return the share; raise an error if it is not one, or would be ignored."""
    check_share(slow_when)
    if slow_when is None:
        return None
    if isinstance(plan, AbstractPilot):
        raise StageError(
            f"slow_when is {slow_when!r}, but the schedule is found while training, and its own "
            "plan says what is slow. Give it there: schedule=Auto(slow_when=…)."
        )
    if not has_backward:
        raise StageError(
            f"slow_when is {slow_when!r}, but there is no loss_fn, or no backward in the schedule, "
            "and only steps with a backward are watched. Give both, or leave slow_when out."
        )
    return slow_when


def check_microbatches(name: str, values: Any, kind: type, num_microbatches: int) -> list[Any]:
    """Return a step's values for each microbatch; raise an error if their number is wrong."""
    if values is None:
        return [kind() for _ in range(num_microbatches)]
    if not isinstance(values, list) or len(values) != num_microbatches:
        got = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        raise StageError(
            f"{name} is {got}. Expected a list with one value for each of the "
            f"{num_microbatches} microbatches of the schedule."
        )
    for mb, value in enumerate(values):
        if not isinstance(value, kind):
            raise StageError(
                f"{name}[{mb}] is a {type(value).__name__}. Expected a {kind.__name__} for "
                "each microbatch: the arguments of the stage."
            )
    return values


def check_timeout(timeout: float) -> float:
    """Return the timeout in seconds; raise an error if it is out of range."""
    if not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST_TIMEOUT_S:
        raise StageError(
            f"timeout is {timeout!r}. Expected seconds, more than 0 and at most a year."
        )
    return float(timeout)


def check_grad_scale(grad_scale: float) -> None:
    """Raise an error unless gradients can be multiplied by this."""
    if not isinstance(grad_scale, int | float) or not 0 < grad_scale < math.inf:
        raise StageError(
            f"grad_scale is {grad_scale!r}. Expected a positive, finite number, such as 1 / 4 to "
            "accumulate the gradients of 4 steps."
        )


def check_grad_is_enabled() -> None:
    """Raise an error if a step with a backward would have none."""
    if not torch.is_grad_enabled():
        raise StepError(
            "step() was called where gradients are disabled, so there would be no backward. "
            "Call it outside of torch.no_grad(), or call eval()."
        )


def check_grads_are_final(settings: Settings, rank: Rank) -> None:
    """Raise an error if gradients lack a step; on all ranks alike, so the pipeline can go on."""
    if not settings.is_final:
        raise GradientError(
            f"rank {rank}: the last step had finalize=False, so gradients are not complete, and "
            "their norm is not known. Clip after a step that finalizes them."
        )


def check_keeps_backward(before: LossFn | None, after: LossFn | None) -> None:
    """Raise an error if another loss_fn would give the pipeline a backward, or take it away."""
    if (before is None) != (after is None):
        had, gets = ("a loss_fn", "none") if after is None else ("no loss_fn", "one")
        raise StageError(
            f"the pipeline was made with {had} and would now have {gets}. All ranks have agreed "
            "whether there is a backward: set another loss_fn, call eval() for steps without a "
            "backward, or make a new pipeline."
        )


def check_settings(settings: Settings) -> Settings:
    """Return the settings; raise an error if one is wrong or would be ignored."""
    if not isinstance(settings.scale_grads, bool):
        raise StageError(f"scale_grads is {settings.scale_grads!r}. Expected True or False.")
    if settings.loss_fn is not None and not callable(settings.loss_fn):
        raise StageError(
            f"loss_fn is {settings.loss_fn!r}. Expected a function of a microbatch's output and "
            "its target, or None."
        )
    if settings.loss_weight is None:
        return settings
    if not callable(settings.loss_weight):
        raise StageError(
            f"loss_weight is {settings.loss_weight!r}. Expected a function from a microbatch's "
            "target to a number, such as lambda target: (target != -100).sum()."
        )
    check_takes_weights("loss_weight", settings)
    return settings


def check_takes_weights(name: str, settings: Settings) -> None:
    """Raise an error if weights of microbatches, given as `name`, would be ignored."""
    if settings.loss_fn is None:
        raise StageError(
            f"{name} was given, but there is no loss_fn, so there is no loss to weigh. Give a "
            f"loss_fn, or leave {name} out."
        )
    if not settings.scale_grads:
        raise StageError(
            f"{name} was given, but scale_grads is False: gradients are the plain sum, in which "
            "every microbatch counts once. Leave one of them out."
        )


def check_replica_group(
    group: dist.ProcessGroup | DeviceMesh | None, settings: Settings
) -> dist.ProcessGroup | None:
    """Return the group; raise an error if it cannot be the group of the replicas."""
    if group is None:
        return None
    check_takes_weights("replica_group", settings)
    return as_process_group("replica_group", group, "dp")


def check_replicas_are_known(groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise an error if other stages have replicas, but the last one does not say which."""
    if not groups:
        raise StageError(
            "gradients of other stages are averaged over replicas, but the last stage is not "
            "wrapped, so it does not know whose batches count in the mean. Give the pipeline "
            "the replica_group: the ranks that hold the last stage in each replica."
        )


def check_same_replicas(named: dist.ProcessGroup, averaging: Sequence[dist.ProcessGroup]) -> None:
    """Raise an error unless weights are summed over the ranks that average the gradients.

    `averaging` has a group for each dimension of their mesh.
    """
    ranks = dist.get_process_group_ranks(named)
    others = {rank for group in averaging for rank in dist.get_process_group_ranks(group)}
    num_others = math.prod(map(dist.get_world_size, averaging))
    if len(ranks) != num_others or not others.issubset(ranks):
        raise StageError(
            f"replica_group has ranks {sorted(ranks)}, but the wrapper around the last stage "
            f"averages over {num_others} ranks, {sorted(others)} among them. Expected the same "
            "ranks: leave replica_group out."
        )


def check_stages(stages: list[PipelineStage]) -> None:
    """Raise an error unless these can be the stages of one rank."""
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise StageError(
                f"stages holds a {type(stage).__name__}. Expected penstock.PipelineStage: import "
                "the stage from penstock too."
            )
    if not stages:
        raise StageError("stages is empty. Give the stages that this rank holds.")
    for name in ("num_stages", "group", "device", "cut"):
        found = {str(getattr(stage, name)) or "none" for stage in stages}
        if len(found) > 1:
            raise StageError(
                f"the stages of one rank differ in {name}: {', '.join(sorted(found))}. "
                "Give all of them the same."
            )


def check_fit(schedule: Schedule, stages: list[PipelineStage]) -> None:
    """Raise an error unless these are the stages that the schedule places on this rank."""
    rank, num_ranks = stages[0].group_rank, stages[0].group_size
    if num_ranks != schedule.num_ranks:
        raise StageError(
            f"the schedule is for {schedule.num_ranks} ranks, but the group has {num_ranks}. "
            "Make the schedule for that number, or give the stages another group."
        )
    if stages[0].num_stages != schedule.num_stages:
        raise StageError(
            f"the schedule has {schedule.num_stages} stages, but the stages say that num_stages "
            f"is {stages[0].num_stages}. Cut the model into {schedule.num_stages} stages."
        )
    held = sorted(stage.stage_index for stage in stages)
    expected = list(schedule.placement.stages_of(rank))
    if held != expected:
        raise StageError(
            f"rank {rank} was given stages {held}, but the schedule places {expected} there. "
            f"Give it those: schedule.placement.stages_of({rank})."
        )


def check_replicas(stages: list[PipelineStage]) -> None:
    """Raise an error if other pipelines, with schedules of their own, would disturb this rank's.

    Replicas of one DistributedDataParallel stage reduce its gradients once, in any schedule.
    """
    together = [stage for stage in stages if stage.is_reduced or stage.is_tensor_parallel]
    is_safe = len(stages) == 1 and all(stage.is_data_parallel for stage in together)
    if together and not is_safe:
        numbers = [stage.stage_index for stage in together]
        raise StageError(
            f'schedule is "auto", and stages {numbers} are data parallel or tensor parallel, but '
            "rank 0 does not know its replicas, so each would find its own schedule. Collectives "
            "would run in different orders, and mix gradients up. Wrap the stages of rank 0 too, "
            "give the pipeline the replica_group on rank 0 of each replica, or give all replicas "
            "the same schedule: find it with penstock.measure_costs and penstock.search."
        )


def check_shared_modules(stages: Sequence[PipelineStage]) -> None:
    """Raise an error if two stages share a sharded module, which is reduced once in a step."""
    for one, other in combinations([stage for stage in stages if stage.is_sharded], 2):
        if one.shares_sharded_module(other):
            raise StageError(
                f"stages {one.stage_index} and {other.stage_index} of rank {one.group_rank} share "
                "a sharded module, whose gradients would be reduced before both have added to "
                "them. Give each stage a copy, and tie their parameters with `tied`."
            )


def check_wrapped_early(late: Collection[StageId]) -> None:
    """Raise an error if stages got replicas after the ranks had told each other who has any."""
    if late:
        raise StageError(
            f"stage {min(late)} was wrapped in data parallelism after the first step, in which the "
            "rank of the last stage learned whose batches count in the mean. Wrap stages before "
            "the first step, or make a new pipeline on all ranks."
        )

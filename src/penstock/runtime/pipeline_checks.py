"""Checks of what a pipeline is given, before anything runs."""

from typing import Any

import torch.distributed as dist

from penstock import schedules
from penstock.errors import StageError
from penstock.ir import Schedule
from penstock.runtime.step_settings import Settings
from penstock.stage import PipelineStage

_LONGEST_TIMEOUT_S = 365 * 24 * 3600


def as_schedule(
    schedule: Schedule | str, stages: list[PipelineStage], num_microbatches: int | None
) -> Schedule:
    """The schedule itself, or the one of that name for these stages."""
    if isinstance(schedule, str):
        if num_microbatches is None:
            raise StageError(
                f"schedule is the name {schedule!r}, which does not say how many microbatches. "
                "Give num_microbatches too, or a Schedule."
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
            f"{schedule.num_microbatches}. Leave it out, or make the schedule for as many."
        )
    schedule.verify()
    return schedule


def check_count(num_microbatches: int | None) -> int:
    """Raises unless this is a number of microbatches."""
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise StageError(
            f"num_microbatches is {num_microbatches!r}. Expected a whole number, at least 1."
        )
    return num_microbatches


def check_microbatches(name: str, values: Any, kind: type, num_microbatches: int) -> list[Any]:
    """Return what a step was given for each microbatch; raises if it is not for as many."""
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
                "each microbatch: what the stage is called with."
            )
    return values


def check_timeout(timeout: float) -> float:
    """Raises unless this is a time that can be waited."""
    if not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST_TIMEOUT_S:
        raise StageError(
            f"timeout is {timeout!r}. Expected seconds, more than 0 and at most a year."
        )
    return float(timeout)


def check_settings(settings: Settings) -> Settings:
    """Raises if an option would be ignored."""
    if not isinstance(settings.scale_grads, bool):
        raise StageError(f"scale_grads is {settings.scale_grads!r}. Expected True or False.")
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
    """Raises if what says how much microbatches count would be ignored."""
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
    group: dist.ProcessGroup | None, settings: Settings
) -> dist.ProcessGroup | None:
    """Raises unless this can be the group of the pipeline's replicas."""
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise StageError(
            f"replica_group is a {type(group).__name__}. Expected a torch.distributed process "
            'group, such as mesh["dp"].get_group().'
        )
    check_takes_weights("replica_group", settings)
    return group


def check_replicas_are_known(group: dist.ProcessGroup | None) -> None:
    """Raises if other stages have replicas, but the last one does not say which."""
    if group is None:
        raise StageError(
            "gradients of other stages are averaged over replicas, but the last stage is not "
            "wrapped, so that it does not know whose batches count in the mean. Give the pipeline "
            "the replica_group: the ranks that hold the last stage in each replica."
        )


def check_same_replicas(named: dist.ProcessGroup, averaging: dist.ProcessGroup) -> None:
    """Raises if weights would be summed over other ranks than gradients are averaged over."""
    ranks, others = map(dist.get_process_group_ranks, (named, averaging))
    if sorted(ranks) != sorted(others):
        raise StageError(
            f"replica_group has ranks {sorted(ranks)}, but DistributedDataParallel around the last "
            f"stage averages over {sorted(others)}. Expected the same ranks: leave replica_group "
            "out."
        )


def check_stages(stages: list[PipelineStage]) -> None:
    """Raises unless these can be the stages of one rank."""
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
    """Raises unless these are the stages that the schedule places on this rank."""
    rank, num_ranks = stages[0].group_rank, stages[0].group_size
    if num_ranks != schedule.num_ranks:
        raise StageError(
            f"the schedule is for {schedule.num_ranks} ranks, but the group has {num_ranks}. "
            "Make it for as many as there are, or give the stages another group."
        )
    if stages[0].num_stages != schedule.num_stages:
        raise StageError(
            f"the schedule has {schedule.num_stages} stages, but the stages say that num_stages "
            f"is {stages[0].num_stages}. Cut the model into {schedule.num_stages}."
        )
    held = sorted(stage.stage_index for stage in stages)
    expected = list(schedule.placement.stages_of(rank))
    if held != expected:
        raise StageError(
            f"rank {rank} was given stages {held}, but the schedule places {expected} there. "
            f"Give it those: schedule.placement.stages_of({rank})."
        )


def check_replicas(stages: list[PipelineStage]) -> None:
    """Raises if the stages of a rank would reduce their gradients in an order of its own."""
    wrapped = [stage.stage_index for stage in stages if stage.is_data_parallel]
    if wrapped and len(stages) > 1:
        raise StageError(
            f'schedule is "auto", and stages {wrapped} are data parallel, with several on a rank. '
            "Every replica would find a schedule of its own, in which gradients are complete in "
            "another order, and be reduced with the wrong ones. Give all replicas one schedule: "
            "find it with penstock.measure_costs and penstock.search, on one of them."
        )

"""Schedules of compat on ranks of this process."""

from collections.abc import Callable
from typing import Any

from torch import nn

import penstock
from local_steps import mean_square, zero_grad
from penstock import LocalGroup, compat

M = 4


def held_by(rank: int, num_ranks: int = 2, style: str = "loop") -> list[int]:
    return compat._utils.generate_rank_to_stage_mapping(num_ranks, 4, style)[rank]


def on_ranks(
    modules: list[nn.Module],
    make: Callable[..., Any],
    main: Callable[[Any], Any],
    *,
    num_ranks: int = 2,
    style: str = "loop",
    **options: Any,
) -> list[Any]:
    """Call `main` on each rank with the schedule that `make` makes of its stages."""

    def on_rank(group: LocalGroup) -> Any:
        stages = [
            compat.PipelineStage(modules[index], index, len(modules), "cpu", group=group)
            for index in held_by(group.rank, num_ranks, style)
        ]
        own = stages if issubclass(make, compat.PipelineScheduleMulti) else stages[0]  # type: ignore[arg-type]
        return main(make(own, M, **{"loss_fn": mean_square, **options}))

    zero_grad(modules)
    return penstock.local_ranks(num_ranks, on_rank)


def steps(batch: Any, **extra: Any) -> Callable[[Any], tuple[Any, list[Any]]]:
    def main(schedule: Any) -> tuple[Any, list[Any]]:
        losses: list[Any] = []
        outputs = schedule.step(*batch.args, target=batch.target, losses=losses, **extra)
        return outputs, losses

    return main

"""Cost tables of the same stages at several memory levels."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.costs import CostTable, Level
from penstock.costs.memory_levels import check_levels, check_tables
from penstock.runtime.measuring.stage_costs import CostPilot, measure_stages
from penstock.runtime.step_settings import LossFn
from penstock.stage import PipelineStage


def measure_memory_levels(
    make_stages: Callable[[Any], PipelineStage | Sequence[PipelineStage]],
    levels: Iterable[Level],
    num_microbatches: int,
    loss_fn: LossFn,
    *args: Any,
    repeats: int = 3,
    warm_up: int = 1,
    recompute: bool = False,
    **options: Any,
) -> dict[Level, CostTable]:
    """Measure what the stages cost at each memory level, as `measure_costs` does.

    `make_stages(level)` returns this rank's stages for a level, such as their modules compiled
    with that memory budget. It is called when the level's turn comes; its stages are dropped after
    that. A level may be any number or text. `options` are the others of `measure_costs`.

    All ranks must call it with the same levels; all get the same tables, which `penstock.plan`
    takes.
    """
    each = check_levels("levels", levels)
    found: dict[Level, CostTable] = {}
    for level in each:
        title = f"level {level!r} of {each!r}"
        pilot = CostPilot(warm_up, repeats, title, recompute=recompute)
        found[level] = measure_stages(
            pilot, make_stages(level), num_microbatches, loss_fn, *args, **options
        )
    check_tables(found)
    return found

"""Schedules train models as if these were not split: one process for each rank, by either link.

`tests/runtime/test_numerics.py` has every schedule and more shapes within one process; `make fuzz`
has them here too.
"""

import pytest

from fuzzing import IS_LONG, rotated
from stage_training import (
    CLASS_NAMES,
    SOME_NAMES,
    Run,
    assert_evaluates_like_unsplit,
    assert_like_unsplit,
    evaluate,
    train,
)
from staged_models import MODELS
from worker_pool import LINKS, WorkerPool

pytestmark = pytest.mark.dist

# One rank has no messages; tests/runtime/test_numerics.py has it.
RANKS = [4, 2]
SOME_CLASSES = CLASS_NAMES if IS_LONG else ["Schedule1F1B", "ScheduleZBVZeroBubble"]


@rotated(num_cases=8, schedule=SOME_NAMES, model=list(MODELS), num_ranks=RANKS, link=LINKS)
def test_registered_schedule_trains_as_unsplit(
    schedule: str, model: str, num_ranks: int, link: str, pool: WorkerPool
) -> None:
    run = Run(model, schedule, num_ranks)
    assert_like_unsplit(run, pool.run(num_ranks, train, run, link=link))


@rotated(schedule=SOME_CLASSES, model=["many", "conv"], link=LINKS)
def test_drop_in_class_trains_uneven_batches_as_unsplit(
    schedule: str, model: str, link: str, pool: WorkerPool
) -> None:
    run = Run(model, schedule, 2, is_even=False)
    assert_like_unsplit(run, pool.run(2, train, run, link=link))


@rotated(schedule=SOME_NAMES, num_ranks=RANKS, link=LINKS)
def test_step_and_eval_alternate(
    schedule: str, num_ranks: int, link: str, pool: WorkerPool
) -> None:
    run = Run("many", schedule, num_ranks, evaluates=True)
    assert_like_unsplit(run, pool.run(num_ranks, train, run, link=link))


@rotated(model=list(MODELS) if IS_LONG else ["many", "transformer"], num_ranks=RANKS, link=LINKS)
def test_forward_only_schedule_evaluates_as_unsplit(
    model: str, num_ranks: int, link: str, pool: WorkerPool
) -> None:
    run = Run(model, "ForwardOnly", num_ranks)
    assert_evaluates_like_unsplit(run, pool.run(num_ranks, evaluate, run, link=link))

"""Every schedule trains every model as if it were not split, over gloo: one process for each rank.

`tests/runtime/test_numerics.py` has the same within one process.
"""

import pytest

from stage_training import (
    CLASS_NAMES,
    TRAINING_NAMES,
    Run,
    assert_evaluates_like_unsplit,
    assert_like_unsplit,
    evaluate,
    train,
)
from staged_models import MODELS
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

# One rank has no messages; tests/runtime/test_numerics.py has it.
RANKS = [2, 4]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", TRAINING_NAMES)
def test_registered_schedule_trains_as_unsplit(
    schedule: str, model: str, num_ranks: int, pool: WorkerPool
) -> None:
    run = Run(model, schedule, num_ranks)
    assert_like_unsplit(run, pool.run(num_ranks, train, run))


@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", CLASS_NAMES)
def test_drop_in_class_trains_uneven_batches_as_unsplit(
    schedule: str, model: str, num_ranks: int, pool: WorkerPool
) -> None:
    run = Run(model, schedule, num_ranks, is_even=False)
    assert_like_unsplit(run, pool.run(num_ranks, train, run))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("schedule", TRAINING_NAMES)
def test_step_and_eval_alternate(schedule: str, num_ranks: int, pool: WorkerPool) -> None:
    run = Run("many", schedule, num_ranks, evaluates=True)
    assert_like_unsplit(run, pool.run(num_ranks, train, run))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_forward_only_schedule_evaluates_as_unsplit(
    model: str, num_ranks: int, pool: WorkerPool
) -> None:
    run = Run(model, "ForwardOnly", num_ranks)
    assert_evaluates_like_unsplit(run, pool.run(num_ranks, evaluate, run))

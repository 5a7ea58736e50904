"""Schedules train models as if these were not split: outputs, losses, gradients.

Each schedule and each model comes up; `make fuzz` has every schedule with every model. All ranks
are in this process; `tests/dist/test_numerics_on_processes.py` has real ones.
"""

import penstock
from fuzzing import rotated
from penstock import compat, schedules
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

RANKS = [4, 2, 1]


def check(run: Run) -> None:
    assert_like_unsplit(run, penstock.local_ranks(run.num_ranks, train, run))


@rotated(schedule=TRAINING_NAMES, model=list(MODELS), num_ranks=[4, 2, 4, 1, 4])
def test_registered_schedule_trains_as_unsplit(schedule: str, model: str, num_ranks: int) -> None:
    check(Run(model, schedule, num_ranks))


@rotated(schedule=CLASS_NAMES, model=list(MODELS), num_ranks=RANKS)
def test_drop_in_class_trains_uneven_batches_as_unsplit(
    schedule: str, model: str, num_ranks: int
) -> None:
    check(Run(model, schedule, num_ranks, is_even=False))


@rotated(schedule=TRAINING_NAMES, num_ranks=RANKS)
def test_step_and_eval_alternate(schedule: str, num_ranks: int) -> None:
    check(Run("many", schedule, num_ranks, evaluates=True))


@rotated(model=list(MODELS), num_ranks=RANKS, is_even=[True, False])
def test_forward_only_schedule_evaluates_as_unsplit(
    model: str, num_ranks: int, is_even: bool
) -> None:
    run = Run(model, "ForwardOnly", num_ranks, is_even=is_even)
    assert_evaluates_like_unsplit(run, penstock.local_ranks(num_ranks, evaluate, run))


def test_every_registered_schedule_that_trains_is_here() -> None:
    assert {"ForwardOnly"} == set(schedules.names()) - set(TRAINING_NAMES)
    assert set(CLASS_NAMES) < set(compat.__all__)
    assert 11 <= len(CLASS_NAMES)

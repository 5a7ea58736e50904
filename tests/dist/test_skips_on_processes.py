"""Values that skip stages, over processes: they train as in the model in one piece.

`tests/runtime/test_skips.py` has more of it within one process.
"""

from typing import Any
from uuid import uuid4

import pytest
import torch.distributed as dist
from torch import Tensor

from fuzzing import IS_LONG, rotated
from limits import HANG_S
from penstock import Schedule, schedules
from penstock.errors import DeadlineError, PipelineError
from skip_models import (
    KINDS,
    Skip,
    SkipRun,
    SkipStage,
    assert_skips_like_unsplit,
    make_skip_pipeline,
    possible_skips,
    random_skips,
    train_skips,
)
from tensor_counts import growth_of
from worker_pool import LINKS, WorkerPool

pytestmark = pytest.mark.dist

NAMES = ["1F1B", "Interleaved1F1B", "ZB-V"]
# Where there are stages to skip.
PLACES = {
    f"{name}-{p}": (name, p)
    for name in NAMES
    for p in ((2, 4) if IS_LONG or name == "ZB-V" else (4,))
    if p * schedules.get(name).stages_per_rank > 2
}
Place = tuple[str, int]


def _make(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    return schedules.get(name)(num_ranks=num_ranks, num_microbatches=num_microbatches)


def check(pool: WorkerPool, run: SkipRun, link: str) -> None:
    ranks = pool.run(run.schedule.num_ranks, train_skips, run, link=link)
    assert_skips_like_unsplit(run, ranks)


@rotated(place=PLACES, num_microbatches=[6, 1], link=LINKS)
def test_random_skips(place: Place, num_microbatches: int, link: str, pool: WorkerPool) -> None:
    schedule = _make(*place, num_microbatches)
    skips = random_skips(schedule.num_stages, num_microbatches)
    check(pool, SkipRun(schedule, skips, is_even=num_microbatches == 1, evaluates=True), link)


@rotated(place=PLACES, link=LINKS)
def test_every_skip_that_is_possible_at_once(place: Place, link: str, pool: WorkerPool) -> None:
    schedule = _make(*place, 4)
    pairs = possible_skips(schedule.num_stages)
    skips = tuple(Skip(*pair, KINDS[sum(pair) % len(KINDS)]) for pair in pairs)
    check(pool, SkipRun(schedule, skips), link)


@rotated(place=PLACES if IS_LONG else {"1F1B-4": ("1F1B", 4), "ZB-V-2": ("ZB-V", 2)}, link=LINKS)
def test_stage_that_gives_nothing_to_the_next_one(
    place: Place, link: str, pool: WorkerPool
) -> None:
    run = SkipRun(_make(*place, 4), (Skip(0, 2), Skip(0, 3), Skip(1, 3, "two")), (0, 1))
    check(pool, run, link)


@rotated(place=PLACES if IS_LONG else {"ZB-V-4": ("ZB-V", 4)}, link=LINKS)
def test_shapes_change_from_step_to_step(place: Place, link: str, pool: WorkerPool) -> None:
    schedule = _make(*place, 4)
    skips = random_skips(schedule.num_stages, 7)
    check(pool, SkipRun(schedule, skips, is_dynamic=True, num_steps=3), link)


# V: ranks 0 1 1 0, where what skips goes both ways at once, there and back. 1F1B: values one way,
# gradients the other. Loop: over four ranks, since with two a skip would end where it began.
LARGE_RUNS = {
    "1F1B-4": ("1F1B", 4, ((0, 2), (0, 3), (1, 3))),
    "ZB-V-2": ("ZB-V", 2, ((0, 2), (1, 3))),
    "ZB-V-4": ("ZB-V", 4, ((0, 6), (1, 7), (2, 4))),
    "Interleaved1F1B-4": ("Interleaved1F1B", 4, ((0, 2), (1, 4), (3, 5))),
}


@rotated(large=LARGE_RUNS, link=LINKS)
def test_large_values_in_both_directions_at_once(
    large: tuple[str, int, Any], link: str, pool: WorkerPool
) -> None:
    name, num_ranks, pairs = large
    skips = tuple(Skip(*pair, "large") for pair in pairs)
    check(pool, SkipRun(_make(name, num_ranks, 4), skips), link)


# As in test_growth_on_processes.py, but for a value that skips: one of them kept in each of the
# measured steps would be 160 MB.
ROOM_BYTES = 40_000_000


def _grow(group: dist.ProcessGroup, run: SkipRun) -> tuple[int, int]:
    pipeline = make_skip_pipeline(group, run, run.modules())
    x, target = run.batch(0)
    step = lambda: pipeline.step(x, target=target)  # noqa: E731
    return growth_of(step, num_steps=60, num_warm=20)


def test_many_steps_do_not_grow(pool: WorkerPool) -> None:
    run = SkipRun(_make("ZB-V", 2, 2), (Skip(0, 2, "large"),))
    for tensors, memory in pool.run(2, _grow, run):
        assert 0 == tensors
        assert memory < ROOM_BYTES


class _Stuck(SkipStage):
    """Does not begin before another rank has given up."""

    def __init__(self, store: dist.Store, key: str, *args: Any) -> None:
        super().__init__(*args)
        self.store, self.key = store, key

    def forward(self, *args: Tensor) -> Any:
        self.store.wait([self.key])
        return super().forward(*args)


def _wait_in_vain(group: dist.ProcessGroup, run: SkipRun, key: str) -> tuple[bool, str]:
    rank, store = dist.get_rank(group), group.get_group_store()
    modules = run.modules()
    modules[0] = _Stuck(store, key, 0, 4, run.skips, ()).double()
    # Only the last rank is impatient.
    pipeline = make_skip_pipeline(group, run, modules, timeout=0.5 if rank == 3 else HANG_S)
    x, target = run.batch(0)
    try:
        pipeline.step(x, target=target)
    except PipelineError as error:
        return isinstance(error, DeadlineError), str(error)
    finally:
        if rank == 3:
            store.set(key, "")
    return False, ""


def test_deadline_names_the_stages_of_what_skips(pool: WorkerPool) -> None:
    run = SkipRun(_make("1F1B", 4, 2), (Skip(0, 3),))
    *others, (is_deadline, message) = pool.run(4, _wait_in_vain, run, f"gave up {uuid4()}")
    assert is_deadline
    assert "the activation of microbatch 0 for stage 3 from stage 0 on rank 0" in message
    for _, report in others:
        assert report

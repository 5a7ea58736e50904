"""Stages that are data, sharded and tensor parallel train as the whole model, by every schedule.

docs/parallelisms.md has the whole table, which scripts/parallelisms.py makes.
"""

from collections.abc import Iterator

import pytest

from fuzzing import IS_LONG, rotated
from mesh_training import BLOCKS, SCHEDULES, WRAPPINGS, Case, Found, are_compatible, run_on_rank
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

PAIRS = {
    f"{wrapping}, {model}": (wrapping, model)
    for number, wrapping in enumerate(WRAPPINGS)
    for place, model in enumerate(BLOCKS)
    if are_compatible(model, wrapping)
    if IS_LONG or (number + place) % 3 == 0
}
ON_FOUR = {key: pair for key, pair in PAIRS.items() if Case(*pair[::-1], "").num_ranks == 4}
ON_EIGHT = {key: pair for key, pair in PAIRS.items() if key not in ON_FOUR}


@pytest.fixture(scope="module")
def wide_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(num_workers=8)
    try:
        yield pool
    finally:
        pool.close()


def check(case: Case, found: list[Found]) -> None:
    assert all(each.difference < 1e-12 for each in found), found
    for each in found:
        assert each.num_groups == each.reductions
        if case.wrapping == "FSDP2, False":
            assert each.num_groups == each.gathers


@rotated(pair=ON_FOUR, schedule=SCHEDULES)
def test_stages_in_a_mesh_train_as_the_whole_model(
    pair: tuple[str, str], schedule: str, fresh_pool: WorkerPool
) -> None:
    wrapping, model = pair
    case = Case(model, wrapping, schedule)
    check(case, fresh_pool.run(4, run_on_rank, case))


# Four ranks take every schedule; eight take some of them, as their processes are slow to start.
@rotated(
    pair=ON_EIGHT if IS_LONG else dict(list(ON_EIGHT.items())[::3]),
    schedule=SCHEDULES if IS_LONG else SCHEDULES[::-3],
)
def test_stages_in_a_mesh_of_eight_train_as_the_whole_model(
    pair: tuple[str, str], schedule: str, wide_pool: WorkerPool
) -> None:
    wrapping, model = pair
    case = Case(model, wrapping, schedule)
    check(case, wide_pool.run(8, run_on_rank, case))

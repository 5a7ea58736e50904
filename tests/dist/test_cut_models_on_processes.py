"""Models cut into stages train as the whole model does, over gloo: each process cuts by itself.

`tests/cutting/test_cut_models.py` has more of it within one process.
"""

import pytest

from cut_models import CUT_MODELS
from cut_training import CutRun, assert_like_whole, train_cut
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist


# Each process traces by itself, which takes long for some models if all share a processor.
ON_FOUR = sorted(set(CUT_MODELS) - {"encoder-decoder"})
WITH_EIGHT_STAGES = ["conv", "multi-use", "nested", "skip-many", "tied-head"]


@pytest.mark.parametrize(("schedule", "num_stages"), [("1F1B", 2), ("ZB-V", 4)])
@pytest.mark.parametrize("name", CUT_MODELS)
def test_two_processes_train_as_whole(
    name: str, schedule: str, num_stages: int, pool: WorkerPool
) -> None:
    run = CutRun(name, num_stages, schedule, num_steps=2)
    assert_like_whole(run, pool.run(2, train_cut, run))


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_processes_train_as_whole(name: str, pool: WorkerPool) -> None:
    run = CutRun(name, 4, "1F1B", num_steps=2)
    assert_like_whole(run, pool.run(4, train_cut, run))


@pytest.mark.parametrize("name", WITH_EIGHT_STAGES)
def test_two_stages_on_each_of_four_processes_train_as_whole(name: str, pool: WorkerPool) -> None:
    run = CutRun(name, 8, "ZB-V", num_steps=2)
    assert_like_whole(run, pool.run(4, train_cut, run))

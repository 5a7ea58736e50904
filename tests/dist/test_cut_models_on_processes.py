"""Models cut into stages train as the whole model does, when each process cuts by itself.

`tests/cutting/test_cut_models.py` has more of it within one process, and `make fuzz` here.
"""

import pytest

from cut_models import CUT_MODELS
from cut_training import CutRun, assert_like_whole, train_cut
from fuzzing import IS_LONG, rotated
from worker_pool import LINKS, WorkerPool

pytestmark = pytest.mark.dist


# Each process traces by itself, which takes long for some models if all share a processor.
ON_TWO = list(CUT_MODELS) if IS_LONG else ["conv", "keywords", "nested"]
ON_FOUR = sorted(set(CUT_MODELS) - {"encoder-decoder"}) if IS_LONG else ["multi-use"]
WITH_EIGHT_STAGES = ["tied-head", *(["conv", "multi-use", "nested", "skip-many"] * IS_LONG)]


@rotated(name=ON_TWO, cut={"1F1B": ("1F1B", 2), "ZB-V": ("ZB-V", 4)}, link=LINKS)
def test_two_processes_train_as_whole(
    name: str, cut: tuple[str, int], link: str, pool: WorkerPool
) -> None:
    schedule, num_stages = cut
    run = CutRun(name, num_stages, schedule, num_steps=2)
    assert_like_whole(run, pool.run(2, train_cut, run, link=link))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_processes_train_as_whole(name: str, pool: WorkerPool) -> None:
    run = CutRun(name, 4, "1F1B", num_steps=2)
    assert_like_whole(run, pool.run(4, train_cut, run))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", WITH_EIGHT_STAGES)
def test_two_stages_on_each_of_four_processes_train_as_whole(name: str, pool: WorkerPool) -> None:
    run = CutRun(name, 8, "ZB-V", num_steps=2)
    assert_like_whole(run, pool.run(4, train_cut, run))

"""Models of transformers and torch train in a traced pipeline over gloo: a process for each rank.

Every rank traces the model for itself. `tests/cutting/test_real_models.py` has the same within one
process, and `make fuzz` has all models here.
"""

import pytest

from fuzzing import IS_LONG
from real_models import REAL_MODELS, assert_like_whole, cut_and_train, train_whole
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist


# To trace a model on every rank takes a second or two.
RUNS = [("gpt2", "balanced 4", "ZBV")]
if IS_LONG:
    RUNS = [
        *((name, "names 2", "1F1B") for name in ("gpt2", "llama", "bert", "vit")),
        *((name, "balanced 4", "ZBV") for name in REAL_MODELS),
    ]


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "cut", "schedule"), RUNS)
def test_model_trains_as_whole(name: str, cut: str, schedule: str, pool: WorkerPool) -> None:
    model = REAL_MODELS[name]
    # The first run loads transformers, which takes a while.
    ranks = pool.run(2, cut_and_train, name, cut, schedule, link="gloo")
    assert_like_whole(train_whole(model, model.build(), model.batch()), ranks)

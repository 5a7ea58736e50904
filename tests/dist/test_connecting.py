"""What connecting costs: questions to the store that all ranks share, and first messages."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from limits import HANG_S
from penstock import Pipeline
from penstock.comm import ProcessGroupComm
from stage_training import CPU, make_stages
from worker_pool import LINKS, WorkerPool

pytestmark = pytest.mark.dist

NUM_RANKS = 4


class CountingStore:
    """Passes all on to a store, and counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._store, name)


def _gather(group: dist.ProcessGroup) -> tuple[dict[str, int], list[Any]]:
    comm = ProcessGroupComm(group, CPU, HANG_S)
    comm._store = store = CountingStore(comm._store)  # type: ignore[assignment]
    values = comm.gather(("value of", comm.rank))
    comm.close()
    return dict(store.asked), values


def test_a_gather_asks_the_store_as_often_for_any_number_of_ranks(pool: WorkerPool) -> None:
    for asked, values in pool.run(NUM_RANKS, _gather):
        assert asked.pop("add") >= 2  # Once for itself, and then from time to time.
        assert {"check": 1, "set": 1, "multi_get": 1} == asked
        assert [("value of", rank) for rank in range(NUM_RANKS)] == values


def _sends(group: dist.ProcessGroup) -> list[int]:
    """Return how many transfers this rank begins in each of three steps."""
    modules: list[nn.Module] = [nn.Linear(4, 4) for _ in range(NUM_RANKS)]
    stages = make_stages(group, modules, [dist.get_rank(group)])
    loss_fn = nn.functional.mse_loss
    pipeline = Pipeline(stages, "1F1B", num_microbatches=4, loss_fn=loss_fn, timeout=HANG_S)
    counts, x = [], torch.ones(8, 4)
    with pipeline._connection.failing_together("in a test") as comm:
        original, sent = comm.send, list[int]()

        def send(tensor: torch.Tensor, receiver: int) -> Any:
            sent.append(receiver)
            return original(tensor, receiver)

        comm.send = send  # type: ignore[method-assign]
    for _ in range(3):
        sent.clear()
        pipeline.step(x, target=x, return_outputs=False)
        counts.append(len(sent))
    return counts


@pytest.mark.parametrize("link", LINKS)
def test_a_first_step_sends_a_form_with_each_message_and_later_ones_only_data(
    pool: WorkerPool, link: str
) -> None:
    first, *middle, last = pool.run(NUM_RANKS, _sends, link=link)
    assert [8, 4, 4] == first == last
    assert [[16, 8, 8]] * 2 == middle

"""A stage wrapped in DistributedDataParallel: its reducer averages gradients in W.

Two processes on this machine, over gloo.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.backward import SplitEngine, stage_backward_input, stage_backward_weight
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

NUM_RANKS = 2
NUM_STEPS = 3


class Model(nn.Module):
    """Products, norms and a raw parameter; the gradient of each takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
        self.raw = nn.Parameter(torch.randn(4, 4))
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x + self.table) @ self.raw
        return y


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(2, 3, 4, generator=random, dtype=torch.float64)
    return x.requires_grad_(), torch.randn(2, 3, 4, generator=random, dtype=torch.float64)


def _expected(model: nn.Module, step: int) -> list[Tensor]:
    """The average over the ranks of the gradients of plain autograd."""
    params = list(model.parameters())
    sums = [torch.zeros_like(param) for param in params]
    for rank in range(NUM_RANKS):
        x, grad = _batch(rank, step)
        for total, part in zip(sums, torch.autograd.grad(model(x), params, grad), strict=True):
            total += part / NUM_RANKS
    return sums


class _Split:
    """I, then W, by the functions or by the engine."""

    def __init__(self, mechanism: str, model: nn.Module) -> None:
        self._model = model
        self._engine = SplitEngine(model) if mechanism == "engine" else None
        self._left: Any = None

    def input_half(self, x: Tensor, grad: Tensor) -> Tensor | None:
        if self._engine is not None:
            (dx, *_), self._left = self._engine.forward(x).backward_input(grad)
        else:
            params = self._model.parameters()
            (dx,), self._left = stage_backward_input(self._model(x), grad, [x], params)
        return dx

    def weight_half(self) -> None:
        if self._engine is not None:
            self._left.run()
        else:
            stage_backward_weight(self._model.parameters(), self._left)


def _train(group: dist.ProcessGroup, mechanism: str) -> None:
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    model = Model().double()
    plain = copy.deepcopy(model)
    reductions: list[int] = []
    # Small buckets: several reductions in each W, some while others wait.
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0001)

    def reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reductions.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(NUM_RANKS), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, reduce)
    split = _Split(mechanism, wrapped)
    for step in range(NUM_STEPS):
        x, grad = _batch(rank, step)
        reference, _ = _batch(rank, step)
        plain(reference).backward(grad)
        plain.zero_grad()
        reductions.clear()
        dx = split.input_half(x, grad)
        assert [] == reductions, "the reducer ran in I"
        assert all(param.grad is None for param in model.parameters())
        torch.testing.assert_close(dx, reference.grad)
        split.weight_half()
        assert reductions, "the reducer did not run in W"
        assert len(set(reductions)) == len(reductions), "a bucket was reduced twice"
        actual = [param.grad for param in model.parameters()]
        torch.testing.assert_close(actual, _expected(plain, step), rtol=1e-10, atol=1e-12)
        model.zero_grad()


@pytest.mark.parametrize("mechanism", ["functions", "engine"])
def test_gradients_are_averaged_over_ranks_in_the_weight_half(
    mechanism: str, pool: WorkerPool
) -> None:
    pool.run(NUM_RANKS, _train, mechanism)

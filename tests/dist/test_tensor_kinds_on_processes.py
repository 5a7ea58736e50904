"""Odd tensors between processes, where links copy memory: they arrive, or they are refused.

`tests/runtime/test_sendable.py` has more of it within one process.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from limits import HANG_S, PROCESS_S
from odd_tensors import REFUSED, SENT, Make, Receiver, Sender, memory_of, numbers
from penstock import Pipeline, PipelineStage
from penstock.errors import StageError
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
LINKS = pytest.mark.parametrize("shared_memory", ["1", "0"], ids=["shared memory", "gloo"])
# What a link could crash on; the rest is refused by the same gate.
CRASHED = ["wrapper", "masked", "nested", "fake", "functional", "quantised", "meta", "freed"]


@contextmanager
def _links(shared_memory: str) -> Iterator[None]:
    os.environ["PENSTOCK_SHARED_MEMORY"] = shared_memory
    try:
        yield
    finally:
        os.environ["PENSTOCK_SHARED_MEMORY"] = "1"  # As WorkerPool.run has it.


def _pipeline(group: Any, module: nn.Module, **kwargs: Any) -> Pipeline:
    stage = PipelineStage(module, dist.get_rank(group), 2, CPU, group=group)
    return Pipeline(stage, "1F1B", num_microbatches=2, timeout=HANG_S, **kwargs)


def _run(group: Any, modules: list[nn.Module]) -> None:
    rank = dist.get_rank(group)
    pipeline = _pipeline(group, modules[rank], loss_fn=lambda output, _: output)
    try:
        for _ in range(2):
            pipeline.step_microbatches([(numbers(),)] * 2 if rank == 0 else None)
    finally:
        pipeline.close()


def _send_all(group: Any, shared_memory: str) -> list[str]:
    """The kinds that did not arrive as they are."""
    warnings.simplefilter("ignore")  # Torch warns of half of these kinds.
    wrong = []
    with _links(shared_memory):
        for name, make in SENT.items():
            receiver = Receiver()
            _run(group, [Sender(make), receiver])
            _, expected = Sender(make)(numbers())
            for found in receiver.came:
                form = (expected.shape, expected.dtype, expected.requires_grad)
                is_same = form == (found.shape, found.dtype, found.requires_grad)
                if not is_same or not torch.equal(memory_of(expected), memory_of(found)):
                    wrong.append(name)
    return wrong


@LINKS
def test_odd_tensors_arrive(shared_memory: str, pool: WorkerPool) -> None:
    assert [[], []] == pool.run(2, _send_all, shared_memory, timeout_s=PROCESS_S)


def _refuse_all(group: Any, shared_memory: str) -> dict[str, str]:
    """What rank 0 said of each kind; rank 1 is told by it."""
    warnings.simplefilter("ignore")
    makes: dict[str, Make] = {name: REFUSED[name].make for name in CRASHED}
    said = {}
    with _links(shared_memory):
        for name, make in makes.items():
            # From the second step on, in which both ends know the form.
            try:
                _run(group, [Sender(make, begin=3), Receiver()])
            except StageError as error:
                said[name] = str(error)
            except RuntimeError as error:
                said[name] = f"other: {error}"
    return said


@LINKS
def test_tensors_that_cannot_be_sent_are_refused(shared_memory: str, pool: WorkerPool) -> None:
    said, heard = pool.run(2, _refuse_all, shared_memory, timeout_s=PROCESS_S)
    expected = {name: REFUSED[name].what for name in CRASHED}
    assert set(expected) == set(said) == set(heard)
    for name, what in expected.items():
        assert said[name].startswith(f"stage 0, microbatch 0: output 1 is {what}")
        assert "because rank 0 failed: StageError" in heard[name]


class _Block(nn.Module):
    """Ends in a row-wise layer, whose result is still being summed when it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


def _blocks() -> list[_Block]:
    torch.manual_seed(0)
    return [_Block(), _Block()]


def _train_block(tensor_group: Any, pipeline_group: Any) -> tuple[list[Tensor], Tensor | None]:
    """The gradients of this rank's stage, and its outputs."""
    block = _blocks()[dist.get_rank() // 2]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, DeviceMesh.from_group(tensor_group, "cpu"), plan)
    pipeline = _pipeline(pipeline_group, block, loss_fn=nn.functional.mse_loss)
    x, target = _batch()
    try:
        for _ in range(2):
            outputs = pipeline.step(x, target=target)
    finally:
        pipeline.close()
    return [param.grad.full_tensor() for param in block.parameters()], outputs


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 8), torch.randn(4, 8)


def _train_tensor_parallel(world: Any) -> list[tuple[list[Tensor], Tensor | None]]:
    """Ranks 0 and 1 hold halves of stage 0, ranks 2 and 3 of stage 1; once by each link.

    In one call, since torch remembers a mesh by its ranks, with groups that are gone later.
    """
    rank = dist.get_rank()
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pipeline_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    results = []
    for shared_memory in ("1", "0"):
        with _links(shared_memory):
            results.append(_train_block(tensor_groups[rank // 2], pipeline_groups[rank % 2]))
    return results


def test_a_stage_that_ends_in_a_row_wise_layer_trains(fresh_pool: WorkerPool) -> None:
    """The result of such a layer has no memory: sending it crashed the process."""
    results = fresh_pool.run(4, _train_tensor_parallel, timeout_s=PROCESS_S)
    model = nn.Sequential(*_blocks())
    x, target = _batch()
    expected = model(x)
    for _ in range(2):
        nn.functional.mse_loss(model(x), target).backward()
    for rank, result in enumerate(results):
        for grads, outputs in result:
            for param, grad in zip(model[rank // 2].parameters(), grads, strict=True):
                torch.testing.assert_close(param.grad, grad)
            if rank >= 2:
                torch.testing.assert_close(expected.detach(), outputs)

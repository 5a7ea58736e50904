"""Gathers and reductions run while the rank computes: a recording shows both at a time.

On a CPU, FSDP2's streams do nothing, and its reductions block. Here threads take the place of
streams, as an accelerator would run them. A collective ends only after a later action has begun,
so a runtime that waited for it too early would never go on.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from limits import HANG_S
from local_steps import mean_square
from penstock import Pipeline, PipelineStage, Schedule
from penstock.ir import Backward, BackwardWeight, Forward, ReduceGrads, Unshard
from penstock.timeline import Recording, Timeline
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

WIDTH = 4
SLEEP_S = 0.05  # So that bars have a width; nothing depends on how long it is.
SPLIT = (
    "0UNSHARD,1UNSHARD,0F0,0F1,1F0,1F1,1I0,1I1,1RESHARD,1W0,1W1,1REDUCE_GRAD,"
    "0I0,0W0,0I1,0W1,0RESHARD,0REDUCE_GRAD\n"
)
FULL = (
    "0UNSHARD,1UNSHARD,0F0,0F1,1F0,1F1,1B0,1B1,1RESHARD,1REDUCE_GRAD,0B0,0B1,0RESHARD,"
    "0REDUCE_GRAD\n"
)


class Gate:
    """What collectives of the second stage wait for: work of the first one on a microbatch."""

    def __init__(self) -> None:
        self._is_open = threading.Event()

    def open(self) -> None:
        self._is_open.set()

    def wait(self) -> None:
        if not self._is_open.wait(HANG_S):
            raise TimeoutError("no action began while the collective ran")
        time.sleep(SLEEP_S)


class Ended:
    """An imitation of the event of a stream."""

    def __init__(self, job: "Future[None] | None") -> None:
        self._job = job

    def synchronize(self) -> None:
        if self._job is not None:
            self._job.result()


class ThreadStream:
    """An imitation of a stream beside that of the computation."""

    thread: ThreadPoolExecutor
    """One for all streams, so that replicas run their collectives in one order."""

    def __init__(self, priority: int = 0) -> None:
        self._last: Future[None] | None = None

    def run(self, job: Callable[[], None]) -> "Future[None]":
        self._last = self.thread.submit(job)
        return self._last

    def record_event(self) -> Ended:
        return Ended(self._last)

    def wait_event(self, event: Any) -> None:
        """What ran before runs in the same thread, or has ended already."""

    wait_stream = wait_event


def wait_on_the_computing_stream(_: Any, event: Any) -> None:
    if event is not None:
        event.synchronize()


class SleepingWork(dist.Work):
    """A gather that another thread runs."""

    def __init__(self, job: "Future[None]") -> None:
        super().__init__()
        self._job = job
        self._future: torch.futures.Future[None] = torch.futures.Future()
        job.add_done_callback(lambda _: self._future.set_result(None))

    def wait(self, timeout: Any = None) -> bool:
        self._job.result()
        return True

    def get_future(self) -> "torch.futures.Future[None]":
        return self._future


class SleepingGather(DefaultAllGather):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert kwargs.pop("async_op"), "only an Unshard of the schedule gathers"

        def job() -> None:
            self._gate.wait()
            super(SleepingGather, self).__call__(*args, **kwargs)

        return SleepingWork(ThreadStream.thread.submit(job))


class SleepingReduction(DefaultReduceScatter):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def job() -> None:
            self._gate.wait()
            super(SleepingReduction, self).__call__(*args, **kwargs)

        stream: Any = torch.cpu.current_stream()
        return stream.run(job)


class Opening(torch.autograd.Function):
    """The identity, which opens one gate in a forward and another in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Gate, second: Gate) -> Tensor:
        ctx.gate = second
        first.open()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.gate.open()
        return grad, None, None


class Stage(nn.Module):
    """Two blocks, which sleep in forwards; the first stage opens the gates of a microbatch."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.gates: list[Gate] = []
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        self.num_forwards += 1
        if self.gates and self.num_forwards % 2 == 0:  # The second of two microbatches.
            x = Opening.apply(x, *self.gates)
        return self.blocks(x)


def train(_: dist.ProcessGroup, text: str) -> tuple[list[Tensor], list[Tensor], Recording]:
    """Return the gradients of a step, those with sleeping collectives, and their recording.

    What it changes in torch stays changed in this process, which serves no other test.
    """
    original = torch.cpu.Stream
    ThreadStream.thread = ThreadPoolExecutor(1)
    torch.cpu.Stream = ThreadStream  # type: ignore[misc,assignment]  # for streams made later
    original.wait_event = wait_on_the_computing_stream  # type: ignore[method-assign]
    own = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    mesh = init_device_mesh("cpu", (2,))
    modules: list[Any] = []
    for index in range(2):
        module = Stage(index)
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        modules.append(fully_shard(module, mesh=mesh))
    stages = [PipelineStage(modules[i], i, 2, "cpu", group=own) for i in range(2)]
    pipeline = Pipeline(
        stages, Schedule.from_csv(text), loss_fn=mean_square, record=True, timeout=HANG_S
    )
    torch.manual_seed(10 + dist.get_rank())
    x, target = torch.randn(2, 4, WIDTH)
    x.requires_grad_()  # So that the first stage has input backwards.

    def step() -> list[Tensor]:
        for module in modules:
            module.zero_grad()
        pipeline.step(x, target=target)
        return [p.grad.full_tensor() for module in modules for p in module.parameters()]

    step()
    expected = step()
    modules[0].gates = [Gate(), Gate()]
    for index, module in enumerate(modules):
        in_forward, in_backward = modules[0].gates
        if index == 0:  # Its own collectives have nothing to wait for.
            in_forward = in_backward = Gate()
            in_forward.open()
        for part in module.modules():
            if isinstance(part, FSDPModule) and part is not module:
                part.set_custom_all_gather(SleepingGather(in_forward))
                part.set_custom_reduce_scatter(SleepingReduction(in_backward))
    found = step()
    ThreadStream.thread.shutdown()
    return expected, found, pipeline.recording()


def bar(timeline: Timeline, action: Any) -> tuple[float, float]:
    place = timeline.schedule.orders[0].index(action)
    return timeline.starts[0][place], timeline.ends[0][place]


@pytest.mark.parametrize("text", [SPLIT, FULL], ids=["split", "full"])
def test_computes_run_beside_gathers_and_reductions_of_another_stage(
    text: str, fresh_pool: WorkerPool
) -> None:
    last = BackwardWeight(0, 0) if text == SPLIT else Backward(0, 0)
    for expected, found, recording in fresh_pool.run(2, train, text):
        assert all(map(torch.equal, expected, found))
        timeline = recording.steps[-1].timeline
        # It was started before the forward. Its bar may begin later: after the gather of the first
        # stage, whose end a busy machine notes late.
        _, ended = bar(timeline, Unshard(1))
        assert bar(timeline, Forward(0, 0))[1] < ended
        began, ended = bar(timeline, ReduceGrads(1))
        compute_began, compute_ended = bar(timeline, last)
        assert began < compute_began < compute_ended < ended
        # The last reduction ends after all computes, and the step waits for it.
        starts, ends = timeline.starts[0], timeline.ends[0]
        assert bar(timeline, ReduceGrads(0))[1] == max(ends)
        total = sum(end - start for start, end in zip(starts, ends, strict=True))
        assert max(ends) - min(starts) < total
        assert recording == Recording.from_json(recording.to_json())

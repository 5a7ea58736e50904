"""Shows: measured costs, and a pipeline that finds a better schedule for them while it trains.

The ranks are in this process; over real ones, leave `group` out and start it with a launcher.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS = 2, 6, 6
PACE_S = 0.02


class Slow(torch.autograd.Function):
    """An identity that takes its time, so that this prints the same on any machine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float) -> Tensor:
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(PACE_S)
        return grad, None


class Stage(nn.Module):
    """Its forward and both halves of its backward take the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x, PACE_S) + Slow.apply(self.weight, 0.0)


def run_rank(group: penstock.LocalGroup) -> None:
    torch.manual_seed(group.rank)
    module, rank = Stage(), group.rank
    stage = penstock.PipelineStage(module, rank, NUM_RANKS, "cpu", group=group)
    x, target = torch.rand(NUM_MICROBATCHES, 8, requires_grad=True), torch.rand(NUM_MICROBATCHES, 8)
    loss_fn = nn.functional.mse_loss

    costs = penstock.measure_costs(stage, NUM_MICROBATCHES, loss_fn, x, target=target, repeats=1)
    with tempfile.TemporaryDirectory() as folder:
        costs.save(Path(folder, "costs.json"))  # For `penstock.simulate` and `penstock.search`.
        assert costs == penstock.CostTable.load(Path(folder, "costs.json"))

    auto = penstock.Auto(memory=10_000)
    pipeline = penstock.Pipeline(stage, auto, num_microbatches=NUM_MICROBATCHES, loss_fn=loss_fn)
    followed, grads = [], []
    for _ in range(NUM_STEPS):
        module.zero_grad()
        pipeline.step(x, target=target)
        followed.append(pipeline.schedule)  # What the next step will run.
        grads.append(module.weight.grad)
    if rank == 0:
        # After step 2 full backwards are to be measured, with the schedule of the first steps.
        changed = next(step for step in range(3, NUM_STEPS) if followed[step - 1] != followed[1])
        print(f"after step {changed} the pipeline went on with another schedule")
        assert all(schedule == followed[-1] for schedule in followed[changed - 1 :])
    for grad in grads:
        torch.testing.assert_close(grad, grads[0])
    print(f"rank {rank}: every step gave the same gradients")


if __name__ == "__main__":
    penstock.local_ranks(NUM_RANKS, run_rank)

"""Files that Penstock writes are run by torch's own class, and give the gradients of the model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from fuzzing import rotated
from mesh_training import make_stages, mean_square
from penstock.passes import Gathers, add_comms, add_gathers
from penstock.schedules import get
from penstock.torch_private import LOADS_WAITS
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

M = 4


def run_file(group: dist.ProcessGroup, path: str, stages: list[int], num_stages: int) -> float:
    """Run one step in torch; return the largest difference of any gradient."""
    whole, modules = make_stages("plain", num_stages), make_stages("plain", num_stages)
    held = [PipelineStage(modules[i], i, num_stages, "cpu", group=group) for i in stages]
    runtime = _PipelineScheduleRuntime(held, M, loss_fn=mean_square)
    runtime._load_csv(path, format="compute_comms")
    torch.manual_seed(1)
    x, target = torch.randn(2, 2 * M, 4, 8).double()
    args = (x,) if 0 in stages else ()
    runtime.step(*args, target=target if num_stages - 1 in stages else None)
    mean_square(nn.Sequential(*whole)(x), target).backward()
    return max(
        (mine.grad - theirs.grad).abs().max().item()
        for i in stages
        for mine, theirs in zip(modules[i].parameters(), whole[i].parameters(), strict=True)
    )


def run_rank(group: dist.ProcessGroup, path: str, held: list[list[int]]) -> float:
    return run_file(group, path, held[group.rank()], sum(map(len, held)))


@rotated(name=["1F1B", "Interleaved1F1B", "ZB-V", "V-Half", "DualPipeV"])
def test_torch_runs_a_written_file(name: str, fresh_pool: WorkerPool, tmp_path: Path) -> None:
    """Reductions are in it, where torch divides gradients by the number of microbatches."""
    plain = get(name)(num_ranks=2, num_microbatches=M)
    schedule = add_comms(add_gathers(plain, Gathers.once()))
    path = tmp_path / "order.csv"
    path.write_text(schedule.to_csv(has_waits=LOADS_WAITS))
    held = [list(schedule.placement.stages_of(rank)) for rank in range(2)]
    for difference in fresh_pool.run(2, run_rank, str(path), held):
        assert difference < 1e-12

"""Shows: a script for torch.distributed.pipelining runs on Penstock by changing one import.

Run it with: torchrun --standalone --nproc-per-node 2 examples/drop_in.py
"""

import torch
import torch.distributed as dist
from torch import nn

# Was: from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from penstock import PipelineStage, ScheduleInterleavedZeroBubble

NUM_MICROBATCHES, WIDTH = 4, 16


def make_stage_module(stage_index: int) -> nn.Module:
    torch.manual_seed(stage_index)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    num_stages = 2 * num_ranks
    stages = [
        PipelineStage(make_stage_module(index), index, num_stages, device)
        for index in (rank, rank + num_ranks)
    ]
    schedule = ScheduleInterleavedZeroBubble(
        stages, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.Adam(
        [weight for stage in stages for weight in stage.submod.parameters()], lr=0.01
    )
    torch.manual_seed(100)
    x = torch.randn(16, WIDTH)
    target = x.roll(1, dims=1)

    for step in range(5):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}")
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

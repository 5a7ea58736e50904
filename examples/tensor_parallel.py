"""Shows: a pipeline of two ranks whose stages are tensor and sequence parallel over two more.

Between blocks, and between stages, each rank holds a part of every sequence.
Run it with: torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import penstock

NUM_MICROBATCHES, BATCH, TOKENS, WIDTH, NUM_STEPS = 4, 16, 8, 16, 5
PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mean_square(output: DTensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.full_tensor(), target)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = penstock.schedules.get("ZB-V")(num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    torch.manual_seed(0)
    blocks = [parallelize_module(Block(), mesh["tp"], PLAN) for _ in range(schedule.num_stages)]
    stages = [
        penstock.PipelineStage(blocks[i], i, schedule.num_stages, "cpu", group=mesh["pp"])
        for i in schedule.placement.stages_of(mesh["pp"].get_local_rank())
    ]
    pipeline = penstock.Pipeline(stages, schedule, loss_fn=mean_square)
    optimizer = torch.optim.AdamW([w for s in stages for w in s.submod.parameters()], lr=0.01)
    x, target = torch.randn(2, BATCH, TOKENS, WIDTH)
    x = distribute_tensor(x, mesh["tp"], [Shard(1)])

    for step in range(NUM_STEPS):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(x, target=target, losses=losses)
        optimizer.step()
        if losses and mesh["tp"].get_local_rank() == 0:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

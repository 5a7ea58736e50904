"""Shows: two pipelines of two ranks whose stages FSDP2 shards, by a zero-bubble schedule.

Each pipeline gets half of every batch. Ranks with the same stages hold half of each parameter.
Run it with: torchrun --standalone --nproc-per-node 4 examples/sharded_stages.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock

NUM_MICROBATCHES, BATCH, WIDTH, NUM_STEPS = 4, 32, 16, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "fsdp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(8)))
    # Uncut, a block would be traced; as modules, each block is sharded by itself.
    pieces = penstock.cut_between_modules(model, 2 * mesh["pp"].size())
    shards = mesh["fsdp"]
    x, target = torch.randn(2, BATCH, WIDTH).chunk(shards.size(), 1)[shards.get_local_rank()]
    pipe = penstock.parallelize(
        model,
        (x,),
        loss_fn=nn.functional.mse_loss,
        num_microbatches=NUM_MICROBATCHES,
        mesh=mesh,
        cut=pieces,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = pipe.step(x, target=target)  # The mean over both pipelines, on every rank.
        optimizer.step()
        if pipe.is_main:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

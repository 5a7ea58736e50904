"""Shows: two pipelines of two ranks whose stages FSDP2 shards, by a zero-bubble schedule.

Each pipeline gets half of every batch. Ranks with the same stages hold half of each parameter.
Run it with: torchrun --standalone --nproc-per-node 4 examples/sharded_stages.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    replica, num_replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()
    schedule = penstock.schedules.get("ZB-V")(num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(8)))
    pieces = penstock.cut_between_modules(model, schedule.num_stages)
    held = schedule.placement.stages_of(mesh["pp"].get_local_rank())
    stages = [pieces.build_stage(i, "cpu", mesh["pp"]) for i in held]
    for stage in stages:
        for module in stage.submod.modules():
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(stage.submod, mesh=mesh["dp"])
    pipeline = penstock.Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss)
    # Made after fully_shard, which replaces the parameters by shards of them.
    optimizer = torch.optim.AdamW([w for s in stages for w in s.submod.parameters()], lr=0.01)
    x, target = torch.randn(2, BATCH, WIDTH).chunk(num_replicas, dim=1)[replica]

    for step in range(NUM_STEPS):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(x, target=target, losses=losses)
        optimizer.step()
        if losses:  # This rank has the last stage; the loss is the mean over the pipelines.
            loss = torch.stack(losses).mean()
            dist.all_reduce(loss, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
            if replica == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

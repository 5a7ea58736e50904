"""Shows: two pipelines of two ranks that train one model, and a checkpoint of it.

Each pipeline gets half of every batch, and ranks with the same stages share their gradients.
It writes the folder penstock-examples/data_parallel.
Run it with: torchrun --standalone --nproc-per-node 4 examples/data_parallel.py
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock

NUM_MICROBATCHES, BATCH, WIDTH, NUM_STEPS = 4, 32, 16, 5
FOLDER = "penstock-examples/data_parallel"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)))


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "pp"))
    model = make_model()
    whole_x, whole_target = torch.randn(2, BATCH, WIDTH)
    x, target = (half.chunk(2)[mesh["dp"].get_local_rank()] for half in (whole_x, whole_target))
    pipe = penstock.parallelize(
        model, (x,), loss_fn=nn.functional.mse_loss, num_microbatches=NUM_MICROBATCHES, mesh=mesh
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = pipe.step(x, target=target)  # The mean over both pipelines, on every rank.
        optimizer.step()
        if pipe.is_main:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    pipe.save(FOLDER)

    if pipe.is_main:  # By the model's own names, so it does not matter how many ranks there were.
        whole = make_model()
        dcp.load({"model": whole.state_dict()}, checkpoint_id=FOLDER, no_dist=True)
        loss = nn.functional.mse_loss(whole(whole_x), whole_target)
        print(f"whole model: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Shows: two pipelines of two ranks that train one model, and a checkpoint of it.

Each pipeline gets half of every batch, and ranks with the same stages share their gradients.
It writes the folder penstock-examples/data_parallel.
Run it with: torchrun --standalone --nproc-per-node 4 examples/data_parallel.py
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import penstock

NUM_REPLICAS, NUM_MICROBATCHES, BATCH, WIDTH, NUM_STEPS = 2, 4, 32, 16, 5
FOLDER = "penstock-examples/data_parallel"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)))


def train(replica: int, pipeline_group: dist.ProcessGroup, same_stages: dist.ProcessGroup) -> None:
    rank, num_ranks = dist.get_rank(pipeline_group), dist.get_world_size(pipeline_group)
    schedule = penstock.schedules.get("ZB-V")(
        num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES
    )
    pieces = penstock.cut_between_modules(make_model(), schedule.num_stages)
    held = schedule.placement.stages_of(rank)
    stages = [pieces.build_stage(i, "cpu", pipeline_group) for i in held]
    modules = [stage.submod for stage in stages]
    for stage in stages:  # Reduces a stage's gradients as soon as its last one is there.
        stage.submod = DistributedDataParallel(stage.submod, process_group=same_stages)
    pipeline = penstock.Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([w for module in modules for w in module.parameters()], lr=0.5)
    x, target = torch.randn(2, BATCH, WIDTH)
    mine = slice(replica * BATCH // NUM_REPLICAS, (replica + 1) * BATCH // NUM_REPLICAS)

    for step in range(NUM_STEPS):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(x[mine], target=target[mine], losses=losses)
        optimizer.step()
        if losses:  # Here is the last stage: the loss of all is the mean over the pipelines.
            loss = torch.stack(losses).mean()
            dist.all_reduce(loss, dist.ReduceOp.AVG, group=same_stages)
            if replica == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)

    # By the model's own names, so it does not matter how many ranks there were.
    state = {name: value for module in modules for name, value in module.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=FOLDER)


def main() -> None:
    dist.init_process_group("gloo")
    shape = (NUM_REPLICAS, dist.get_world_size() // NUM_REPLICAS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "pipeline"))
    train(mesh.get_local_rank("replicas"), mesh.get_group("pipeline"), mesh.get_group("replicas"))

    if dist.get_rank() == 0:
        whole = make_model()
        dcp.load({"model": whole.state_dict()}, checkpoint_id=FOLDER, no_dist=True)
        x, target = torch.randn(2, BATCH, WIDTH)
        print(f"whole model: loss {nn.functional.mse_loss(whole(x), target).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

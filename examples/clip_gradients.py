"""Shows: gradients clipped by their norm over all ranks, and a learning rate that warms up.

The model has a parameter that two stages hold, which counts once.
Run it with: torchrun --standalone --nproc-per-node 2 examples/clip_gradients.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # Before there is a group, which torch keeps in it otherwise.
from torch import Tensor, nn

import penstock

WIDTH, WORDS, RATE, MAX_NORM, NUM_STEPS = 16, 32, 0.02, 0.1, 6


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    model[-1].weight = model[0].weight  # Tied: the first and the last stage both hold it.
    return model


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


def main() -> None:
    dist.init_process_group("gloo")
    make = penstock.schedules.get("ZB-H1")
    schedule = make(num_ranks=dist.get_world_size(), num_microbatches=4)
    pieces = penstock.cut_between_modules(make_model(), schedule.num_stages)
    stages = [pieces.build_stage(i, "cpu") for i in schedule.placement.stages_of(dist.get_rank())]
    pipeline = penstock.Pipeline(stages, schedule, loss_fn=nn.functional.cross_entropy)
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    words = torch.arange(WORDS)
    for step in range(NUM_STEPS):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(words, target=words.roll(1), losses=losses)
        norm = pipeline.clip_grad_norm_(MAX_NORM)  # On every rank, and the same on all.
        optimizer.step()
        scheduler.step()
        if losses:
            loss = torch.stack(losses).mean().item()
            print(f"step {step}: loss {loss:.4f}, norm {norm.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Shows: training a small language model on two processes with a zero-bubble schedule.

It reads source code of Python's own library, a character at a time, and learns which comes next.
Run it with: torchrun --standalone --nproc-per-node 2 examples/train.py
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock

WIDTH, TOKENS, BATCH, NUM_MICROBATCHES, NUM_STEPS = 64, 32, 16, 8, 60


class Block(nn.Module):
    """A transformer block that looks back only."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


def make_stage_module(stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(stage)
    first = [nn.Embedding(128, WIDTH)] if stage == 0 else []
    last = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)] if stage == num_stages - 1 else []
    return nn.Sequential(*first, Block(), *last)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    make = penstock.schedules.get("ZB-V")
    schedule = make(num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
    stages = [
        penstock.PipelineStage(
            make_stage_module(i, schedule.num_stages), i, schedule.num_stages, "cpu"
        )
        for i in schedule.placement.stages_of(rank)
    ]
    pipeline = penstock.Pipeline(stages, schedule, loss_fn=loss_of)
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=0.003)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes())) % 128
    random = torch.Generator().manual_seed(0)

    for step in range(NUM_STEPS):
        starts = torch.randint(len(text) - TOKENS, (BATCH,), generator=random)
        batch = torch.stack([text[start : start + TOKENS + 1] for start in starts.tolist()])
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(batch[:, :-1], target=batch[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        if losses and (step % 10 == 0 or step == NUM_STEPS - 1):
            print(f"step {step:3d}  loss {torch.stack(losses).mean().item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Shows: training a small language model on two processes with a zero-bubble schedule.

It reads source code of Python's own library, a character at a time, and learns which comes next.
Run it with: torchrun --standalone --nproc-per-node 2 examples/train.py
"""

import argparse
from pathlib import Path

import torch
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


def make_model() -> nn.Module:
    torch.manual_seed(0)  # Every rank makes the same model.
    blocks = (Block() for _ in range(8))
    return nn.Sequential(
        nn.Embedding(128, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)
    )


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    text = torch.tensor(list(Path(argparse.__file__).read_bytes())) % 128
    random = torch.Generator().manual_seed(0)

    def next_batch() -> Tensor:
        starts = torch.randint(len(text) - TOKENS, (BATCH,), generator=random)
        return torch.stack([text[start : start + TOKENS + 1] for start in starts.tolist()])

    pipe = penstock.parallelize(
        make_model(), (next_batch()[:, :-1],), loss_fn=loss_of, num_microbatches=NUM_MICROBATCHES
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.003)
    for step in range(NUM_STEPS):
        batch = next_batch()
        optimizer.zero_grad()
        loss = pipe.step(batch[:, :-1], target=batch[:, 1:])
        optimizer.step()
        if pipe.is_main and (step % 10 == 0 or step == NUM_STEPS - 1):
            print(f"step {step:3d}  loss {loss:.2f}", flush=True)
    pipe.close()


if __name__ == "__main__":
    main()

"""Shows: how to cut, into how many microbatches, with which schedule, before there is a machine.

The model is on the meta device: it has shapes, but no memory is taken and nothing is computed.
"""

import torch
from torch import Tensor, nn

import penstock

NUM_RANKS, BATCH_SIZE, NUM_TOKENS = 4, 32, 1024
GIGABYTE = 2**30


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 16, batch_first=True)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


with torch.device("meta"):
    width, vocabulary = 2048, 32_000
    model = nn.Sequential(
        nn.Embedding(vocabulary, width),
        *(Block(width) for _ in range(10)),
        nn.Linear(width, vocabulary),
    )
    tokens = torch.zeros(BATCH_SIZE, NUM_TOKENS, dtype=torch.long)

# From shapes to seconds: how many operations a rank does in one, and what a message takes.
QUESTION = {
    "batch": tokens,
    "microbatches": (8, 16, 32),
    "layers": [*model],  # They are called one after the other, so that nothing need be traced.
    "stages_per_rank": 1,
    "speed": 4e13,
    "delay": 5e-4,
    "effort": 0.02,
}


def show(title: str, **options: float) -> None:
    best = penstock.plan(model, NUM_RANKS, **QUESTION, **options).best
    print(f"{title}: {best.num_microbatches} microbatches of {best.mb_size}, {best.time:.1f} s")
    print(f"  stages begin at layers {', '.join(best.cut_points)}")


# Without a price for each action, small microbatches look best.
show("actions that cost nothing beside their work", memory=80 * GIGABYTE)
show("actions that take 10 ms more", memory=80 * GIGABYTE, overhead=1e-2)
show("the same in 9 GB", memory=9 * GIGABYTE, overhead=1e-2)

try:
    show("the same in 2 GB", memory=2 * GIGABYTE)
except penstock.errors.ScheduleError as error:
    print(error)

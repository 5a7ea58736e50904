"""Shows: what one rank of a pipeline of 16 holds and sends, found on one small machine.

The step is that of the real runtime, on tensors that have shapes but no values.
"""

import torch
from torch import nn

import penstock

NUM_RANKS, NUM_MICROBATCHES = 16, 32

with torch.device("meta"):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(2 * NUM_RANKS))
    )
    x = torch.empty(8 * NUM_MICROBATCHES, 1024)

for schedule in ("GPipe", "1F1B", "V-Min"):
    found = penstock.dry_run(
        model,
        x,
        num_ranks=NUM_RANKS,
        example_target=x,
        loss_fn=nn.functional.mse_loss,
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        ranks=NUM_RANKS // 2,
    )
    [rank] = found.ranks
    print(f"{schedule}, stages {rank.stages}: {rank.activation_bytes / 2**20:.2f} MiB activations")
    for other, traffic in rank.sent.items():
        print(f"  to rank {other}: {traffic.num_messages} messages, {traffic.num_bytes} bytes")

print(found.proven)

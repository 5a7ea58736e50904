"""Shows: clipped gradients, a learning rate that warms up, and checkpoints for any number of ranks.

It resumes from the folder penstock-examples/checkpoint. The first and last stages share a weight.
Run it with: torchrun --standalone --nproc-per-node 2 examples/checkpoint.py
"""

from pathlib import Path

import torch
from torch import nn

import penstock

WIDTH, WORDS, RATE, MAX_NORM, NUM_STEPS = 16, 32, 0.02, 0.1, 6
FOLDER = Path("penstock-examples", "checkpoint")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    model[-1].weight = model[0].weight
    return model


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


def main() -> None:
    words = torch.arange(WORDS)
    loss_fn = nn.functional.cross_entropy
    with penstock.parallelize(make_model(), (words,), loss_fn=loss_fn, num_microbatches=4) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
        done = 0
        if FOLDER.exists():
            extra = pipe.load(FOLDER, optimizer)
            done = extra["step"]
            scheduler.load_state_dict(extra["scheduler"])
        for step in range(done, done + NUM_STEPS):
            optimizer.zero_grad()
            loss = pipe.step(words, target=words.roll(1))
            norm = pipe.clip_grad_norm_(MAX_NORM)  # The same on all ranks, as is the loss.
            optimizer.step()
            scheduler.step()
            if pipe.is_main:
                print(f"step {step}: loss {loss:.4f}, norm {norm:.4f}", flush=True)
        extra = {"step": done + NUM_STEPS, "scheduler": scheduler.state_dict()}
        pipe.save(FOLDER, optimizer, extra=extra)


if __name__ == "__main__":
    main()

"""Shows: snapshots in memory, so that a killed rank costs a few steps and no file system.

Rank 1 kills itself once. torchrun starts all ranks again, and they go on from the last snapshot:
torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/snapshots.py
"""

import os
import signal

import torch
from torch import nn

import penstock

WIDTH, NUM_STEPS, EVERY, KILLED_IN = 16, 10, 3, 8


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(8))
    return nn.Sequential(*blocks)


def is_killed(step: int) -> bool:
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return step == KILLED_IN and os.environ.get("RANK") == "1" and is_first and may_restart


def main() -> None:
    x, target = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
    loss_fn = nn.functional.mse_loss
    with penstock.parallelize(make_model(), (x,), loss_fn=loss_fn, num_microbatches=4) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        snapshots = pipe.snapshots(optimizer)
        restored = snapshots.restore()  # Weights, optimizer and random numbers, if there are any.
        done = 0 if restored is None else restored[0]
        for step in range(done + 1, NUM_STEPS + 1):
            if is_killed(step):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = pipe.step(x, target=target)
            optimizer.step()
            if pipe.is_main:
                print(f"step {step}: loss {loss:.6f}", flush=True)
            if step % EVERY == 0:
                snapshots.take(step)
        snapshots.close()


if __name__ == "__main__":
    main()

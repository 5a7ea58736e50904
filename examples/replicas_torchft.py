"""Shows: two pipelines that train one model; if a process dies, the other pipeline goes on.

It needs torchft: pip install -c constraints.txt '.[replicas]'. Run this in one terminal:
    torchft_lighthouse --bind '[::]:29510' --min_replicas 1 --join_timeout_ms 5000 \
        --heartbeat_timeout_ms 1000
and this in two more, with REPLICA=0 and with REPLICA=1:
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 TORCHFT_QUORUM_RETRIES=10
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    REPLICA=0 torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/replicas_torchft.py
Then kill one of the processes whose numbers it prints, with kill -9.
"""

import os
import sys
import time
from datetime import timedelta

import torch
from torch import Tensor, nn
from torchft import Manager, ProcessGroupGloo

import penstock
from penstock.parallel import average_grads

NUM_REPLICAS, BATCH, WIDTH = 2, 32, 16


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)))


def batch_of(step: int) -> tuple[Tensor, ...]:
    return torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()


def main(num_steps: int) -> None:
    example = batch_of(0)[0].chunk(NUM_REPLICAS)[0]
    pipe = penstock.parallelize(
        make_model(), (example,), loss_fn=nn.functional.mse_loss, num_microbatches=4
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)

    def load(state: dict[str, dict]) -> None:
        pipe.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        state_dict=lambda: {"model": pipe.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=load,
        min_replica_size=1,
        use_async_quorum=False,  # A pipeline that comes back has the state before its first step.
        timeout=timedelta(seconds=10),
        replica_id=f"replica_{os.environ['REPLICA']}",
    )
    print(f"rank {pipe.rank} is process {os.getpid()}", flush=True)
    while manager.current_step() < num_steps:
        manager.start_quorum()  # Agrees with the others who takes part, and loads their state.
        step, num_alive = manager.current_step(), manager.num_participants()
        # A pipeline that is alone trains on both halves of the batch, one after the other.
        halves = list(zip(*(each.chunk(NUM_REPLICAS) for each in batch_of(step)), strict=True))
        own = halves[manager.participating_rank() :: num_alive]
        optimizer.zero_grad()
        losses = [pipe.step(x, target=target, grad_scale=1 / len(own)) for x, target in own]
        loss = torch.stack(losses).mean()
        average_grads(pipe, manager.allreduce)
        manager.allreduce(loss).wait()
        if manager.should_commit():  # Otherwise a pipeline was lost: the step is done once more.
            optimizer.step()
            if pipe.is_main:
                print(f"step {step}: loss {loss:.5f}, {num_alive} alive", flush=True)
        time.sleep(0.1)  # Leaves time to kill a process.
    manager.shutdown(wait=False)
    pipe.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 600)

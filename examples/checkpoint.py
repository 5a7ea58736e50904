"""Shows: checkpoints with the state of the optimizer, which any other cut can go on from.

It resumes from the newest one in penstock-examples/checkpoint, on any number of ranks.
Run it with: torchrun --standalone --nproc-per-node 2 examples/checkpoint.py
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import penstock

WIDTH, WORDS, RATE, NUM_STEPS = 16, 32, 0.02, 6
FOLDER = Path("penstock-examples", "checkpoint")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    model[-1].weight = model[0].weight  # Tied: the first and the last stage both hold it.
    return model


def state_of(stages: list[penstock.PipelineStage], optimizer: torch.optim.Optimizer) -> Any:
    state: dict[str, Any] = {}
    for stage in stages:
        state |= {f"model.{name}": value for name, value in stage.submod.state_dict().items()}
        for name, weight in stage.submod.named_parameters():
            kept = optimizer.state[weight].items()
            state |= {f"optimizer.{name}.{kind}": value for kind, value in kept}
    return state


def load(stages: list[penstock.PipelineStage], optimizer: torch.optim.Optimizer) -> int:
    saved = sorted(FOLDER.glob("*/.metadata"))  # It is written last: what has none is incomplete.
    if not saved:
        return 0
    for weight in (w for group in optimizer.param_groups for w in group["params"]):
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # Makes the optimizer's tensors; they are filled now, as the weights are.
    state = {**state_of(stages, optimizer), "step": 0}
    dcp.load(state, checkpoint_id=saved[-1].parent)
    return state["step"]


def main() -> None:
    dist.init_process_group("gloo")
    make = penstock.schedules.get("ZB-V")
    schedule = make(num_ranks=dist.get_world_size(), num_microbatches=4)
    pieces = penstock.cut_between_modules(make_model(), schedule.num_stages)
    stages = [pieces.build_stage(i, "cpu") for i in schedule.placement.stages_of(dist.get_rank())]
    pipeline = penstock.Pipeline(stages, schedule, loss_fn=nn.functional.cross_entropy)
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=RATE)
    done = load(stages, optimizer)
    words = torch.arange(WORDS)
    for step in range(done, done + NUM_STEPS):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(words, target=words.roll(1), losses=losses)
        optimizer.step()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
    done += NUM_STEPS
    dcp.save({**state_of(stages, optimizer), "step": done}, checkpoint_id=FOLDER / f"{done:06}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Shows: a Hugging Face model on two processes, cut between its blocks without a line changed.

It computes its own loss, as models of transformers do that are given labels. Needs transformers.
Run it with: torchrun --standalone --nproc-per-node 2 examples/hugging_face.py
"""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import penstock

TOKENS, BATCH, NUM_MICROBATCHES, NUM_STEPS = 32, 16, 8, 8


def make_model() -> GPT2LMHeadModel:
    """The same on every rank; from_pretrained(...) is too."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_head=4, n_embd=64, vocab_size=256, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).train()


def loss_of(output: Any, target: None) -> Tensor:
    return output.loss


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    make = penstock.schedules.get("ZB-H1")
    schedule = make(num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)

    tokens = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % 256
    microbatch = tokens[: BATCH // NUM_MICROBATCHES]
    model = make_model()
    pieces = penstock.cut(
        model,
        mb_kwargs={"input_ids": microbatch, "labels": microbatch, "use_cache": False},
        split_policy=penstock.Balanced(schedule.num_stages, placement=schedule.placement),
    )
    if rank == 0:
        print(pieces.info(), flush=True)
    stages = [pieces.build_stage(i, "cpu") for i in schedule.placement.stages_of(rank)]
    del model, pieces  # With them go the stages of the other ranks.
    gc.collect()

    pipeline = penstock.Pipeline(stages, schedule, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([w for s in stages for w in s.submod.parameters()], lr=0.003)
    for step in range(NUM_STEPS):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipeline.step(
            input_ids=tokens, labels=tokens, use_cache=False, losses=losses, return_outputs=False
        )
        optimizer.step()
        if losses:
            print(f"step {step}  loss {torch.stack(losses).mean().item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Shows: a Hugging Face model on two processes, without a changed line in it.

It computes its own loss, as models of transformers do that are given labels. Needs transformers.
Run it with: torchrun --standalone --nproc-per-node 2 examples/hugging_face.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock

TOKENS, BATCH, NUM_MICROBATCHES, NUM_STEPS = 32, 16, 8, 8


def make_model() -> GPT2LMHeadModel:
    """The same on every rank; penstock.load_pretrained(folder) reads only a rank's own part."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_head=4, n_embd=64, vocab_size=256, bos_token_id=0, eos_token_id=0
    )
    config.use_cache = False
    return GPT2LMHeadModel(config).train()


def main() -> None:
    tokens = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % 256
    batch = {"input_ids": tokens, "labels": tokens}
    pipe = penstock.parallelize(
        make_model(), batch, loss_fn="model", schedule="ZB-H1", num_microbatches=NUM_MICROBATCHES
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.003)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = pipe.step(**batch)
        optimizer.step()
        if pipe.is_main:
            print(f"step {step}  loss {loss:.2f}", flush=True)
    pipe.close()


if __name__ == "__main__":
    main()

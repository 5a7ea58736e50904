"""Shows: a loop of accelerate on a pipeline of two processes, with five lines changed.

Each of them follows a comment with what stood there before. Needs transformers and accelerate.
Run it with: torchrun --standalone --nproc-per-node 2 examples/from_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

# Before: nothing
import penstock

TOKENS, BATCH, VOCABULARY, NUM_STEPS = 16, 8, 64, 8
FOLDER = "penstock-examples/from_accelerate"


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=VOCABULARY, use_cache=False)
    return LlamaForCausalLM(config).train()


def make_loader() -> DataLoader:
    """The same batches on every rank: its generator draws nothing else."""
    tokens = torch.arange(NUM_STEPS * BATCH * TOKENS).reshape(-1, TOKENS) * 7 % VOCABULARY
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    order = torch.Generator().manual_seed(0)
    return DataLoader(examples, batch_size=BATCH, shuffle=True, generator=order)


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = make_model(), make_loader()
    # Before: model, loader = accelerator.prepare(model, loader)
    model = penstock.parallelize(model, next(iter(make_loader())), loss_fn="model", device="cpu")
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, NUM_STEPS)
    for step, batch in enumerate(loader):
        # Before: loss = model(**batch).loss
        # Before: accelerator.backward(loss)
        loss = model.step(**batch)
        # Before: norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}  loss {loss:.4f}  norm {norm:.4f}", flush=True)
    # Before: accelerator.unwrap_model(model).save_pretrained(FOLDER)
    model.save_pretrained(FOLDER)
    accelerator.end_training()


if __name__ == "__main__":
    main()

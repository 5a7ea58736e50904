"""Shows: a Trainer of transformers on a pipeline of two processes, with two lines changed.

Each of them follows a comment with what stood there before. Needs transformers and accelerate.
Run it with: torchrun --standalone --nproc-per-node 2 examples/from_trainer.py
"""

import torch

# Before: from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

# Before: nothing
from penstock.parallel.hugging_face_trainer import PipelineTrainer as Trainer

TOKENS, BATCH, VOCABULARY, NUM_ROWS = 16, 8, 64, 64
FOLDER = "penstock-examples/from_trainer"


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=VOCABULARY)
    return LlamaForCausalLM(config)


def make_rows() -> list[dict[str, torch.Tensor]]:
    tokens = torch.arange(NUM_ROWS * TOKENS).reshape(-1, TOKENS) * 7 % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    args = TrainingArguments(
        FOLDER,
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        learning_rate=0.01,
        warmup_steps=2,
        logging_steps=1,
        save_steps=8,
        report_to="none",
        use_cpu=True,
    )
    rows = make_rows()
    trainer = Trainer(model=make_model(), args=args, train_dataset=rows, eval_dataset=rows[:20])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"evaluated: loss {loss:.4f}", flush=True)
    trainer.save_model()
    trainer.end()


if __name__ == "__main__":
    main()

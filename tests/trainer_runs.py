"""A training by transformers, as a script, for a Trainer of one's choice."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from penstock.errors import StepError

TOKENS, VOCABULARY = 8, 32


def make_model() -> LlamaForCausalLM:
    """A model with tied weights, in float64, so that the order of additions does not matter."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(
        **sizes, num_hidden_layers=3, vocab_size=VOCABULARY, tie_word_embeddings=True
    )
    return LlamaForCausalLM(config).double()


def make_rows(num_rows: int) -> list[dict[str, torch.Tensor]]:
    """Rows of which some count more labels than others."""
    tokens = torch.arange(num_rows * TOKENS).reshape(-1, TOKENS) * 5 % VOCABULARY
    labels = tokens.clone()
    for number, row in enumerate(labels):
        row[: number % TOKENS] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def make_args(folder: Path, **options: Any) -> TrainingArguments:
    """Arguments for two epochs of four updates each, the last of which is smaller."""
    chosen = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "adam_epsilon": 1e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "include_num_input_tokens_seen": "all",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **{**chosen, **options})


def leave_out_labels(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch in which random labels do not count."""
    tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    return {"input_ids": tokens, "labels": labels.where(torch.rand(labels.shape) < 0.8, -100)}


class DrawOnRanks(TrainerCallback):
    """Draws on ranks other than the first, as stages do that have dropout."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.rand(int(os.environ["RANK"]))


def run(
    trainer_type: Any,
    checkpoint: str = "whole/checkpoint-3",
    at_end: Callable[[Any], None] | None = None,
) -> None:
    """Train, save to the folder `whole`, and write the logs; then resume from a checkpoint."""
    rows, held_out = make_rows(52), make_rows(12)
    logs = {}
    for name, resumed in (("whole", None), ("resumed", checkpoint)):
        trainer = trainer_type(
            model=make_model(),
            args=make_args(Path(name)),
            train_dataset=rows,
            eval_dataset=held_out,
            data_collator=leave_out_labels,
            callbacks=[DrawOnRanks()],
        )
        done = trainer.train(resume_from_checkpoint=resumed)
        assert trainer.state.global_step == done.global_step
        logs[name] = trainer.state.log_history
        logs[f"{name} evaluated"] = trainer.evaluate()["eval_loss"]
        trainer.save_model()
        if trainer.is_world_process_zero():
            Path("logs.json").write_text(json.dumps(logs))
    if at_end is not None:
        at_end(trainer)
    trainer.end()


def evaluate_different_batches(trainer: Any) -> None:
    """Evaluate other rows on each rank, and print the error."""
    try:
        trainer.evaluate(make_rows(8 + dist.get_rank())[dist.get_rank() :])
    except StepError as error:
        print(error)

"""A Trainer on a pipeline of one rank does what a Trainer does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from penstock.parallel.hugging_face_trainer import PipelineTrainer
from trainer_runs import make_args, make_model, make_rows


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def make_adapted_model() -> Any:
    model = make_model()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize(
    ("make", "options", "tolerance"),
    [
        (make_adapted_model, {}, 1e-5),
        # bfloat16 has 8 bits, and gradients are added in another order.
        (lambda: make_model().float(), {"bf16": True}, 5e-3),
        # The model with the greatest loss is an early one.
        (
            make_model,
            {
                "load_best_model_at_end": True,
                "metric_for_best_model": "eval_loss",
                "greater_is_better": True,
            },
            1e-5,
        ),
    ],
    ids=["adapter", "bf16", "best model"],
)
def test_trainer_learns_the_same_on_one_rank(
    make: Callable[[], Any], options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    found = []
    for name, trainer_type in (("plain", Trainer), ("ours", PipelineTrainer)):
        args = make_args(tmp_path / name, gradient_accumulation_steps=1, **options)
        rows = {"train_dataset": make_rows(24), "eval_dataset": make_rows(12)}
        trainer = trainer_type(model=make(), args=args, **rows)
        trainer.train()
        best = trainer.state.best_global_step
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        found.append((best, [*losses, trainer.evaluate()["eval_loss"]]))
    (expected_best, expected), (best, losses) = found
    assert expected_best == best
    assert "load_best_model_at_end" not in options or best == 3
    assert expected == pytest.approx(losses, rel=tolerance)

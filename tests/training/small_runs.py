"""A model and a text that are small enough for a test to train."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.comm import LocalGroup, local_ranks
from penstock.training.settings import GptConfig, TrainConfig
from penstock.training.text import Text
from penstock.training.trainer import Trained, train

MODEL = GptConfig(num_layers=4, width=16, num_heads=2, context=8)
TEXT = Text("", b"the quick brown fox jumps over the lazy dog. " * 20)
PLAIN = TrainConfig(MODEL, batch=8, num_microbatches=4, steps=4, lr=0.01, every=2)


def _run_rank(group: LocalGroup, config: TrainConfig, text: Text) -> Trained:
    return train(config, text, group=group)


def run(text: Text = TEXT, **options: Any) -> Trained:
    """Train on ranks that are threads; returns what rank 0 knows."""
    config = replace(PLAIN, **options)
    return local_ranks(config.num_ranks, _run_rank, config, text)[0]


def losses(**options: Any) -> list[float]:
    return [done.loss for done in run(**options).steps]


def saved_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")

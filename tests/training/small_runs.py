"""A model and a text that are small enough for a test to train."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.comm import LocalGroup, local_ranks
from penstock.training.choices import Data
from penstock.training.documents import Documents
from penstock.training.gpt_sizes import GptConfig
from penstock.training.loader import Batches, Sequences
from penstock.training.settings import TrainConfig
from penstock.training.tokens import ByteTokens, tokenise
from penstock.training.trainer import Trained, train

MODEL = GptConfig(num_layers=4, width=16, num_heads=2, context=8)
DATA = Data(Documents((), (b"the quick brown fox jumps over the lazy dog. " * 20,)))
PLAIN = TrainConfig(MODEL, batch=8, num_microbatches=4, steps=4, lr=0.01, every=2)


def _run_rank(group: LocalGroup, config: TrainConfig, data: Data) -> Trained:
    return train(config, data, group=group)


def run(read: Data = DATA, **options: Any) -> Trained:
    """Train on ranks that are threads; returns what rank 0 knows."""
    config = replace(PLAIN, data=read.documents.paths, **options)
    return local_ranks(config.num_ranks, _run_rank, config, read)[0]


def losses(**options: Any) -> list[float]:
    return [done.loss for done in run(**options).steps]


def batches(*, batch: int = PLAIN.batch) -> Batches:
    """The batches that a plain run sees."""
    tokens = tokenise(DATA.documents, ByteTokens())
    return Batches(Sequences(tokens, MODEL.context), batch=batch, seed=0)


def saved_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")

"""Parts of transformers and accelerate that a Trainer on a pipeline uses."""

import copy
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.parallel.adapters import is_of_peft
from penstock.runtime.own_loss import IGNORED


@dataclass(frozen=True, slots=True)
class DataState:
    """A process that has all data to itself, in the place of accelerate's PartialState."""

    process_index: int
    local_process_index: int
    distributed_type: Any
    num_processes: int = 1

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0


def with_own_data(args: Any) -> Any:
    """Return arguments of a process that is alone with its data."""
    own = copy.copy(args)
    kinds = type(args.distributed_state.distributed_type)
    own.distributed_state = DataState(
        process_index=dist.get_rank(),
        local_process_index=int(os.environ.get("LOCAL_RANK", "0")),
        distributed_type=kinds.NO,
    )
    return own


def causal_models() -> set[str]:
    """Return the names of the classes of causal language models."""
    return set(import_module("transformers.trainer").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def without_adapter(model: Any) -> Any:
    """Return a model, or the one that an adapter of PEFT was added to."""
    return model.get_base_model() if is_of_peft(model) else model


def num_labels(labels: Tensor) -> int:
    """Return the number of labels that count."""
    return int(labels.ne(IGNORED).sum())


def align_tokens(model: nn.Module, processing: Any) -> None:
    """Give the model the special tokens of its tokenizer, before it is known how it is saved."""
    names = import_module("transformers.trainer")
    if isinstance(processing, names.PreTrainedTokenizerBase | names.ProcessorMixin):
        names.align_special_tokens(model, processing)


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer, which accelerate has wrapped."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def digest(batch: Mapping[str, Tensor]) -> int:
    """Return a number that differs for batches that differ."""
    found = zlib.crc32(repr([(name, batch[name].shape) for name in sorted(batch)]).encode())
    for name in sorted(batch):
        flat = batch[name].detach().cpu().contiguous().reshape(-1)
        found = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), found)
    return found


def described(forms: Mapping[str, tuple[torch.Size, torch.dtype]]) -> str:
    """Return the shapes and dtypes of a batch in words."""
    return ", ".join(
        f"{name} of shape {tuple(shape)} and {dtype}" for name, (shape, dtype) in forms.items()
    )

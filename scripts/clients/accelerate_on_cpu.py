"""Run a small model of transformers by accelerate's prepare_pippy, and save what each rank gets.

    torchrun --nproc-per-node 2 scripts/clients/accelerate_on_cpu.py MODEL GATHERS GRADS FOLDER

GATHERS and GRADS are 0 or 1: whether all ranks get the outputs, and whether gradients are enabled.
The file knows nothing of Penstock. compare_accelerate.py starts it.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.inference import prepare_pippy
from accelerate.utils import operations
from torch import nn

NUM_LAYERS, WIDTH, LENGTH, WORDS = 4, 32, 8, 61
_TEXT = {"hidden_size": WIDTH, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}


def make_model(name: str) -> nn.Module:
    """Return a model with random parameters, the same in every process."""
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=NUM_LAYERS, n_embd=WIDTH, n_head=4, vocab_size=WORDS, use_cache=False
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        config = transformers.LlamaConfig(
            **_TEXT, intermediate_size=64, vocab_size=WORDS, use_cache=False
        )
        return transformers.LlamaForCausalLM(config)
    if name == "bert":
        config = transformers.BertConfig(**_TEXT, intermediate_size=64, vocab_size=WORDS)
        return transformers.BertForMaskedLM(config)
    if name == "vit":
        config = transformers.ViTConfig(**_TEXT, intermediate_size=64, image_size=16, patch_size=4)
        return transformers.ViTForImageClassification(config)
    config = transformers.T5Config(
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=NUM_LAYERS,
        num_heads=4,
        vocab_size=WORDS,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def make_inputs(name: str, size: int) -> dict[str, Any]:
    """Return keyword arguments for `size` samples."""
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(size, 3, 16, 16)}
    words = torch.randint(1, WORDS, (size, LENGTH))
    if name == "t5":
        return {"input_ids": words, "decoder_input_ids": torch.randint(1, WORDS, (size, LENGTH))}
    if name == "bert":
        mask = torch.ones(size, LENGTH, dtype=torch.long)
        mask[:, -2:] = 0
        return {"input_ids": words, "attention_mask": mask}
    return {"input_ids": words}


def as_values(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors among outputs, however they are nested."""
    if isinstance(outputs, torch.Tensor):
        return [outputs.detach()]
    if isinstance(outputs, dict):
        outputs = outputs.values()
    elif outputs is None:
        outputs = ()
    return [value for part in outputs for value in as_values(part)]


def share_shape(tensor: torch.Tensor | None) -> tuple[torch.Size, int]:
    """Tell all ranks the shape and dtype of a tensor that the last one has."""
    kinds = operations.TENSOR_TYPE_TO_INT
    known = [None if tensor is None else (tensor.shape, kinds[tensor.dtype])]
    torch.distributed.broadcast_object_list(known, src=torch.distributed.get_world_size() - 1)
    return known[0]


def main(name: str, gathers: bool, has_grads: bool, folder: Path) -> None:
    state = PartialState(cpu=True)
    # accelerate 1.15 gives torch.zeros() a tensor for a shape, which torch 2.13 refuses.
    operations.gather_tensor_shape = share_shape
    model = make_model(name).eval()
    with torch.no_grad():
        # By samples, as microbatches have one each: sums of a larger batch may round otherwise.
        inputs = make_inputs(name, state.num_processes)
        samples = [
            as_values(model(**{key: value[i : i + 1] for key, value in inputs.items()}))
            for i in range(state.num_processes)
        ]
        whole = [torch.cat(parts) for parts in zip(*samples, strict=True)]
    model = prepare_pippy(
        model,
        split_points="auto",
        example_kwargs=make_inputs(name, 1),
        gather_output=gathers,
    )
    with nullcontext() if has_grads else torch.no_grad():
        outputs = model(**make_inputs(name, state.num_processes))
    kind = type(outputs).__name__
    record = {"kind": kind, "values": as_values(outputs), "whole": whole}
    torch.save(record, folder / f"{state.process_index}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1], sys.argv[2] == "1", sys.argv[3] == "1", Path(sys.argv[4]))

"""Folders with small models of transformers, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import penstock
from penstock.parallel import Pretrained

VOCABULARY = 64


def make_llama(*, is_tied: bool = False, **options: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
        **options,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def make_gpt2() -> GPT2LMHeadModel:
    """A model with a tied head and linear layers that are transposed; without dropout."""
    config = GPT2Config(
        n_layer=3,
        n_head=2,
        n_embd=16,
        n_positions=32,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def make_gpt2_body() -> GPT2Model:
    return make_gpt2().transformer


def make_mixtral() -> MixtralForCausalLM:
    """A model whose files have each expert's matrices, which are merged when they are loaded."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
    )
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


def save(model: Any, folder: Path, *, num_bytes: str = "10KB") -> Path:
    """Save a model in several files, or in one if `num_bytes` has room for it."""
    model.save_pretrained(folder, max_shard_size=num_bytes)
    return folder


def make_tokens() -> Tensor:
    return torch.randint(VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(1))


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, target[:, 1:].flatten())


def grads_of_whole(model: Any, num_microbatches: int = 4) -> dict[str, Tensor]:
    """The gradients of one step with the whole model."""
    tokens = make_tokens()
    model.train()
    model.config.use_cache = False
    for part in tokens.chunk(num_microbatches):
        (next_token_loss(model(part), part) / num_microbatches).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cut_in_two(made: nn.Module | Pretrained) -> penstock.CutModel:
    model = made.model if isinstance(made, Pretrained) else made
    return penstock.cut(model, (make_tokens()[:2],), split_policy=penstock.Balanced(2))


def cut_once(made: nn.Module | Pretrained) -> dict[str, Any]:
    """Options of `parallelize` for two ranks that share one trace, which is slow."""
    return {"schedule": "1F1B", "cut": cut_in_two(made)}

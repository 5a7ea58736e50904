"""Models of the transformers library in small, each built from its config alone."""

import inspect
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # Before transformers is loaded.

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

BATCH_SIZE, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS, IMAGE = 4, 16, 64, 32, 4, 4, 32

CATEGORIES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}


def _all(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# What each parameter of a config becomes, if the config has it.
SIZES: dict[str, Any] = {
    **_all("vocab_size src_vocab_size tgt_vocab_size entity_vocab_size", VOCABULARY),
    **_all("hidden_size d_model n_embd dim emb_dim embedding_size attention_hidden_size", WIDTH),
    **_all("backbone_hidden_size word_embed_proj_dim lru_width entity_emb_size", WIDTH),
    **_all("intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dff dim_ff", 2 * WIDTH),
    **_all("n_inner ffn_hidden_size moe_intermediate_size hidden_dim inner_dim", 2 * WIDTH),
    **_all("shared_expert_intermediate_size moe_shared_expert_intermediate_size", WIDTH),
    **_all("intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size", WIDTH),
    **_all("num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers", LAYERS),
    **_all("num_decoder_layers num_encoder_layers num_blocks", LAYERS),
    **_all("num_attention_heads n_head n_heads encoder_attention_heads", HEADS),
    **_all("decoder_attention_heads num_heads attention_heads num_decoder_attention_heads", HEADS),
    **_all("num_encoder_attention_heads swa_num_attention_heads", HEADS),
    **_all("num_key_value_heads num_kv_heads swa_num_key_value_heads", 2),
    **_all("max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len", 64),
    **_all("model_max_length context_length max_target_positions max_source_positions", 64),
    **_all("max_encoder_position_embeddings max_decoder_position_embeddings", 64),
    **_all("head_dim d_kv dim_head qk_nope_head_dim v_head_dim swa_head_dim kv_channels", 8),
    **_all("qk_rope_head_dim index_head_dim rotary_dim attention_head_size", 8),
    **_all("kv_lora_rank q_lora_rank o_lora_rank laurel_rank gated_norm_rank", 16),
    **_all("num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num", 4),
    **_all("num_experts_per_tok num_experts_per_token moe_k moe_topk top_k index_topk", 2),
    **_all("n_group topk_group num_expert_group index_n_heads linear_num_key_heads", 2),
    **_all("linear_num_value_heads", 2),
    **_all("n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers", 1),
    **_all("linear_key_head_dim linear_value_head_dim linear_head_dim", 8),
    **_all("mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim", 8),
    **_all("mamba_n_heads mamba_num_heads", 8),
    **_all("chunk_size mamba_chunk_size sliding_window attention_window_size window_size", 8),
    **_all("local_attention sliding_window_size attention_chunk_size", 8),
    **_all("pad_token_id", 0),
    **_all("bos_token_id decoder_start_token_id", 1),
    **_all("eos_token_id sep_token_id forced_eos_token_id", 2),
    **_all("attention_type", "original_full"),
    **_all("router_jitter_noise input_jitter_noise", 0.0),
    **_all("image_size", IMAGE),
    **_all("vocab_size_per_layer_input", VOCABULARY),
    **_all("hidden_size_per_layer_input", 8),
    **_all("num_nextn_predict_layers", 0),
    **_all("use_cache", False),
    **_all("mask_time_prob mask_feature_prob", 0.0),
}
# Vision models: most of their sizes are lists that must fit each other, and stay as they are.
IMAGE_SIZES = {**SIZES, **_all("embed_dim", 24), "window_size": 4, "num_heads": None}
for _name in ("num_layers", "hidden_dim", "chunk_size", "n_embd"):
    IMAGE_SIZES.pop(_name, None)

_SLIDING, _FULL = "sliding_attention", "full_attention"
# What single types need on top; a name with a category is only for that one.
OWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv", _FULL]},
    "gemma3n_text": {
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "num_kv_shared_layers": 2,
        "intermediate_size": [2 * WIDTH] * LAYERS,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "causal/reformer": {"is_decoder": True},
    "zamba": {
        "attention_hidden_size": 2 * WIDTH,
        "num_hidden_layers": 12,
        "attn_layer_period": 6,
        "attn_layer_offset": 4,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "adapter_rank": 8,
        "mamba_headdim": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "esmc": {"num_key_value_heads": HEADS},
    "funnel": {
        "attention_type": "relative_shift",
        "block_sizes": (2, 2),
        "d_head": 8,
        "d_inner": 2 * WIDTH,
        "num_decoder_layers": 2,
    },
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "qwen4_exp_text": {"layer_types": ["linear_attention"] * LAYERS},
    "nllb-moe": {"moe_token_dropout": 0.0},
    "masked/perceiver": {
        "max_position_embeddings": LENGTH,
        "d_latents": WIDTH,
        "num_latents": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": LAYERS,
        "num_self_attention_heads": HEADS,
        "num_cross_attention_heads": HEADS,
    },
    "swin": {"image_size": 128},
    "swinv2": {"image_size": 128},
    "donut-swin": {"image_size": 128},
    "efficientnet": {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    "mobilevitv2": {"image_size": 64},
    "mobilevit": {"image_size": 64},
    "textnet": {"image_size": [64, 64]},
    "longformer": {"attention_window": 8},
    "led": {"attention_window": 8},
    "mobilebert": {
        "intra_bottleneck_size": WIDTH,
        "num_feedforward_networks": 2,
        "embedding_size": 16,
    },
    "neomme": {"head_dim": 16},
    "perceiver": {
        "d_latents": WIDTH,
        "num_latents": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": LAYERS,
        "num_self_attention_heads": HEADS,
        "num_cross_attention_heads": HEADS,
    },
    "cohere_compass_text": {
        "rope_parameters": {_FULL: {"rope_type": "default", "rope_theta": 1e4}},
        "layer_types": [_FULL] * LAYERS,
    },
}
for _category in ("causal", "masked"):
    OWN[f"{_category}/reformer"] = {
        "is_decoder": _category == "causal",
        "attn_layers": ("local", "lsh", "local", "lsh"),
        "axial_pos_embds": False,
        "feed_forward_size": 2 * WIDTH,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
    }


class TinyModel(NamedTuple):
    """A model in float64 and in training mode, and a batch for it, all by keyword."""

    model: nn.Module
    batch: dict[str, Any]


def types_of(category: str) -> Iterator[tuple[str, str]]:
    """Yield each model type of a category with the name of its class; the first if several."""
    for kind, names in getattr(modeling_auto, CATEGORIES[category]).items():
        yield kind, names if isinstance(names, str) else names[0]


def build(category: str, kind: str, class_name: str = "") -> TinyModel:
    """Build a model of a type, and a batch for it."""
    class_name = class_name or dict(types_of(category))[kind]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    config = tiny_config(CONFIG_MAPPING[kind], category, kind)
    wanted = model_class.config_class
    if wanted is not None and not isinstance(config, wanted):
        config = next(part for part in vars(config).values() if isinstance(part, wanted))
    if kind == "dbrx":
        config.attn_config.rope_theta, config.attn_config.clip_qkv = 1e4, 8.0
    for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 1)):
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    model = model_class(config).double().train()
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    with suppress(Exception):
        model.set_experts_implementation("batched_mm")  # The default needs float32 on a CPU.
    _spread(model)
    return TinyModel(model, make_batch(category, kind, model))


def tiny_config(config_class: Any, category: str, kind: str, **more: Any) -> Any:
    """Return a config with small sizes and without anything random."""
    parameters = inspect.signature(config_class.__init__).parameters
    sizes = IMAGE_SIZES if category == "image" else SIZES
    given: dict[str, Any] = {}
    for name, parameter in parameters.items():
        default = parameter.default
        if name in sizes and not isinstance(default, (list, tuple)):
            if sizes[name] is not None:
                given[name] = sizes[name]
        elif name == "depths" and isinstance(default, (list, tuple)):
            given[name] = type(default)(min(2, depth) for depth in default)
        elif _is_rate(name) and isinstance(default, (int, float)) and default is not True:
            given[name] = type(default)(0)
        elif _is_rate(name) and isinstance(default, (list, tuple)):
            given[name] = type(default)(0.0 for _ in default)
    if "kv_lora_rank" in given and "num_key_value_heads" in given:
        given["num_key_value_heads"] = HEADS
    parts = getattr(config_class, "sub_configs", {})
    whole = config_class() if parts else None
    for name in parts:
        part = getattr(whole, name, None)
        if part is not None:
            given[name] = tiny_config(type(part), category, part.model_type)
    given.update(OWN.get(f"{category}/{kind}", OWN.get(kind, {})))
    return config_class(**{**given, **more})


def _is_rate(name: str) -> bool:
    """Return whether a parameter says how often something is dropped at random."""
    return "drop" in name and "token" not in name and "path_shape" not in name


def make_batch(category: str, kind: str, model: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments of a batch for a model, with labels where it takes them."""
    torch.manual_seed(1)
    known = inspect.signature(model.forward).parameters
    config: Any = model.config
    batch: dict[str, Any] = {}
    if kind == "imagegpt":
        pixels = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH))
        return {"input_ids": pixels, "labels": torch.randint(2, (BATCH_SIZE,))}
    if category == "image":
        size = getattr(config, "image_size", None) or getattr(
            getattr(config, "vision_config", None), "image_size", IMAGE
        )
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        batch["pixel_values"] = torch.randn(BATCH_SIZE, channels, height, width).double()
        if "labels" in known:
            batch["labels"] = torch.randint(config.num_labels, (BATCH_SIZE,))
        return batch | OWN_INPUTS.get(f"{category}/{kind}", {})
    batch["input_ids"] = _tokens()
    if "labels" in known:
        batch["labels"] = _tokens()
    return batch | OWN_INPUTS.get(f"{category}/{kind}", {})


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH_SIZE, LENGTH))


def _codebooks() -> dict[str, Tensor]:
    """Return tokens of four codebooks, one row for each, and their labels."""
    ids = torch.randint(3, VOCABULARY, (4 * BATCH_SIZE, LENGTH))
    return {"input_ids": ids, "labels": torch.randint(3, VOCABULARY, (BATCH_SIZE, LENGTH, 4))}


OWN_INPUTS: dict[str, dict[str, Any]] = {
    "causal/musicgen": _codebooks(),
    "causal/musicgen_melody": _codebooks(),
    "image/siglip2": {
        "pixel_values": torch.randn(BATCH_SIZE, 4, 768).double(),
        "pixel_attention_mask": torch.ones(BATCH_SIZE, 4, dtype=torch.long),
        "spatial_shapes": torch.full((BATCH_SIZE, 2), 2),
    },
    "causal/git": {"pixel_values": torch.randn(BATCH_SIZE, 3, IMAGE, IMAGE).double()},
}


def _spread(model: nn.Module) -> None:
    """Make weights so large that every layer matters, those that start at zero too."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.02 * noise)

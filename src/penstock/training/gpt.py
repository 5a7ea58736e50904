"""A GPT that reads bytes, and its stages.

The model is made on the meta device and cut there. Each rank gives values only to its own stages.
The values of a parameter depend on its name, so the model is the same however it is cut. No rank
holds the whole model.
"""

import math

import torch
from torch import Tensor, nn

from penstock.cutting.cut_model import CutModel
from penstock.cutting.cut_policies import Balanced
from penstock.cutting.untraced_cut import cut_between_modules
from penstock.ir import Placement
from penstock.training.gpt_sizes import VOCABULARY, GptConfig
from penstock.training.loader import generator_for
from penstock.training.token_loss import next_token_loss

LAYERS = ("embed", "blocks", "head")


class Gpt(nn.Module):
    """A decoder: an embedding, blocks, and a head that predicts the next byte."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Embed(nn.Module):
    """The embedding of bytes and of their positions."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.tokens(tokens) + self.positions(places)
        return x


class Block(nn.Module):
    """Causal attention, then an MLP, each after a norm and with a residual connection."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        y: Tensor = x + self.mlp_out(nn.functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return y


class Head(nn.Module):
    """The logits of the next byte."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def cut(
    config: GptConfig,
    placement: Placement,
    *,
    microbatch: int,
    dtype: torch.dtype = torch.float32,
) -> CutModel:
    """Cut the model into stages without values, balanced by costs counted from shapes."""
    with torch.device("meta"):
        model = Gpt(config).to(dtype)
        example = torch.zeros(microbatch, config.context, dtype=torch.long)
    policy = Balanced(
        placement.num_stages, placement=placement, loss_fn=next_token_loss, target=example
    )
    return cut_between_modules(model, policy, layers=LAYERS, mb_args=(example,))


@torch.no_grad()
def initialise(module: nn.Module, config: GptConfig, seed: int) -> None:
    """Set the initial values of a model or a part of it, by the seed and the names."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:  # The scale of a norm.
            parameter.fill_(1)
        else:
            # The residual sum stays small at first, however many blocks add to it.
            depth = math.sqrt(2 * config.num_layers) if "_out." in name else 1
            # Drawn on the CPU, so that every device has the same values.
            values = torch.empty(parameter.shape)
            values.normal_(std=0.02 / depth, generator=generator_for(seed, name))
            parameter.copy_(values)

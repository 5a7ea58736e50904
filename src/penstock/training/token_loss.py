"""The loss of a language model: how well it predicts the next token."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import OptionError


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens, computed in at least 32 bits."""
    logits = logits_of(output).flatten(0, 1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide, target.flatten())


def logits_of(output: Any) -> Tensor:
    """Return the logits in what a model returns: a tensor, or an output of transformers."""
    logits = output.get("logits") if isinstance(output, Mapping) else output
    logits = getattr(logits, "logits", logits)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise OptionError(
            f"the model returned a {type(output).__name__} without logits for each token. Expected "
            "a tensor of (sequences, tokens, vocabulary), or an output of transformers that has "
            "`logits`: give --model a causal language model."
        )
    return logits

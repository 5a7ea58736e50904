"""AdamW, and the learning rate of each step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from penstock.training.settings import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step: a rise, then half a cosine.

    It rises from lr / warmup to lr in the first `warmup` steps. Then it falls to min_lr, which the
    last step has; without min_lr, it stays.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.min_lr is None:
        return config.lr
    done = min((step - config.warmup) / (config.steps - config.warmup), 1.0)
    height = (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * height


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW for a rank's parameters; weight decay is for matrices alone."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2]},
    ]
    return torch.optim.AdamW(groups, lr=config.lr)


def set_rates(optimizer: torch.optim.AdamW, config: TrainConfig, step: int) -> float:
    """Give the optimizer the settings of a step; return its learning rate."""
    lr = learning_rate(config, step)
    matrices, others = optimizer.param_groups
    matrices["lr"] = others["lr"] = lr
    matrices["weight_decay"], others["weight_decay"] = config.weight_decay, 0.0
    return lr

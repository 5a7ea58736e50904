"""Small models whose forward a test writes, cut and compared with the whole."""

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock
from cut_training import NUM_MICROBATCHES, ROWS, assert_trained_like, train_pipe
from penstock import Pipe
from staged_models import Batch

WIDTH = 4
Run: TypeAlias = Callable[..., Any]


class Net(nn.Module):
    """Layers and whatever a case does with them."""

    def __init__(self, run: Run, **modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for name, module in modules.items():
            self.add_module(name, module)
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def make_batch() -> Batch:
    size = ROWS * NUM_MICROBATCHES
    return Batch((randn(size, WIDTH),), {}, torch.zeros(size))


def loss_fn(outputs: Any, _: Tensor) -> Tensor:
    """Of all outputs that have a gradient."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return sum((leaf.square().mean() for leaf in leaves if leaf.requires_grad), torch.zeros(()))


def check(
    model: nn.Module,
    num_stages: int,
    batches: list[Batch],
    *,
    dynamic_shapes: bool = False,
    **options: Any,
) -> Pipe:
    """Cut a model, and raise unless it trains as a copy of it does."""
    model = model.double()
    example = pytree.tree_map_only(Tensor, lambda leaf: leaf[:ROWS].clone(), batches[0])
    whole = copy.deepcopy(model)
    pipe = penstock.cut(model, example.args, example.kwargs, **options)
    assert num_stages == pipe.num_stages
    start = copy.deepcopy(whole.state_dict())
    for name in ("1F1B", "ZB-V"):
        stages_per_rank = penstock.schedules.get(name).stages_per_rank
        if num_stages % stages_per_rank:
            continue
        for index in range(num_stages):
            module = pipe.get_stage_module(index)
            module.load_state_dict({key: start[key] for key in module.state_dict()})
            module.zero_grad()
        num_ranks = num_stages // stages_per_rank
        ranks = penstock.local_ranks(
            num_ranks, train_pipe, pipe, name, batches, loss_fn, dynamic_shapes
        )
        assert_trained_like(copy.deepcopy(whole), batches, loss_fn, ranks)
    return pipe

"""Cut a model between its modules, without tracing it."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from penstock.cutting.chain import Chain
from penstock.cutting.cut_model import CutModel
from penstock.cutting.cut_policies import Balanced
from penstock.cutting.layer_costs import count_chain
from penstock.errors import PartitionError


def cut_between_modules(
    model: nn.Module,
    stages: int | Sequence[str] | Balanced,
    *,
    layers: Sequence[str | Callable[..., Any]] | None = None,
    mb_args: tuple[Any, ...] | None = None,
    mb_kwargs: dict[str, Any] | None = None,
) -> CutModel:
    """Cut a model between its modules, without tracing it.

    A Sequential is cut as it is. For a model with its own forward, `layers` says what the forward
    does: names of modules in the order in which they are called, each with the outputs of the one
    before. A ModuleList or Sequential stands for its entries, and functions may come in between.
    Keyword arguments go to every layer that has a parameter of that name.

    `stages` is a number of stages, the names of the modules at which a new stage begins, or a
    policy. With `mb_args`, an example of one microbatch, stages are balanced by the costs of their
    layers. Without it, a number of stages gives each stage about the same number of layers.

        >>> import torch, penstock
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = torch.nn.Embedding(7, 4)
        ...         self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        ...         self.head = torch.nn.Linear(4, 7)
        >>> layers = ["embed", "blocks", "head"]
        >>> pipe = penstock.cut_between_modules(Model(), ["blocks.2"], layers=layers)
        >>> [list(dict(pipe.get_stage_module(i).named_children())) for i in (0, 1)]
        [['embed', 'blocks'], ['blocks', 'head']]
    """
    chain = Chain.of(model, layers)
    if isinstance(stages, str):
        stages = [stages]
    if isinstance(stages, int):
        costs = [1.0] * len(chain.names) if mb_args is None else None
        stages = Balanced(stages, costs=costs)
    if not isinstance(stages, Balanced):
        return chain.cut([0, *map(chain.find, stages)])
    costs_of_layers = stages.costs
    if costs_of_layers is None:
        if mb_args is None:
            raise PartitionError(
                "the policy has no costs, and there are no mb_args to count them with. "
                "Give mb_args, an example of one microbatch."
            )
        costs_of_layers = stages.with_loss(*count_chain(chain, mb_args, mb_kwargs or {}))
    return chain.cut(stages.choose(costs_of_layers, chain.names))

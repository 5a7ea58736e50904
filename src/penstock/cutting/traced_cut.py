"""Trace a model and cut it into stages."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from penstock.cutting.assembling import assemble
from penstock.cutting.cut_model import CutModel
from penstock.cutting.marks import SplitPoint, remove_marks, unify_marks
from penstock.cutting.tracing import Trace, trace
from penstock.errors import PartitionError


def cut(
    module: nn.Module,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> CutModel:
    """Trace a model and cut it into stages.

    `mb_args` and `mb_kwargs` are an example of one microbatch. The cuts are where the model calls
    `pipe_split()`, and at the modules that `split_spec` names. A `split_policy` overrides both: for
    example `penstock.Balanced(num_stages)`, or a function that puts calls of `pipe_split` into the
    traced graph.

        >>> import torch, penstock
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> spec = {"1": penstock.SplitPoint.END}
        >>> pipe = penstock.cut(model, (torch.randn(8, 4),), split_spec=spec)
        >>> print(pipe.info())
        stage 0: 20 parameters
        stage 1, from 2 (linear_1): 10 parameters
          receives relu float32[8, 4]
        >>> list(pipe.get_stage_module(1).state_dict())
        ['2.weight', '2.bias']
    """
    return assemble(trace_marked(module, mb_args, mb_kwargs, split_spec, split_policy))


def trace_marked(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None,
    split_spec: Mapping[str, SplitPoint] | None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None,
) -> Trace:
    """Return the trace of a model, with the marks at which it is to be cut."""
    if split_spec and split_policy is not None:
        raise PartitionError(
            "split_spec and split_policy were both given, and each says where to cut. Give one."
        )
    traced = trace(module, mb_args, mb_kwargs or {}, split_spec or {})
    if split_policy is not None:
        remove_marks(traced.graph_module)
        marked = split_policy(traced.graph_module)
        if not isinstance(marked, fx.GraphModule):
            raise PartitionError(
                f"split_policy returned a {type(marked).__name__}. Expected the traced graph "
                "module that it was given, with calls of pipe_split in it."
            )
        unify_marks(marked)
        traced = replace(traced, graph_module=marked)
    return traced

"""The batch of a step, cut into microbatches or taken as it was cut."""

from typing import Any

from penstock.microbatches import split_args_kwargs_into_chunks
from penstock.microbatches.splitting import split_target
from penstock.runtime.pipeline_checks import check_microbatches
from penstock.runtime.step_settings import Batch


def cut_batch(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    loss_kwargs: dict[str, Any] | None,
    num_microbatches: int,
    args_chunk_spec: Any,
    kwargs_chunk_spec: Any,
) -> Batch:
    """Cut the arguments of a step, and its target if there is one."""
    args_split, kwargs_split = split_args_kwargs_into_chunks(
        args, kwargs, num_microbatches, args_chunk_spec, kwargs_chunk_spec if kwargs else None
    )
    targets = [] if target is None else split_target(target, num_microbatches)
    return Batch(args_split, kwargs_split, targets, loss_kwargs or {})


def take_microbatches(
    args: list[tuple[Any, ...]] | None,
    kwargs: list[dict[str, Any]] | None,
    targets: list[Any] | None,
    loss_kwargs: dict[str, Any] | None,
    num_microbatches: int,
) -> Batch:
    """Check that a batch which is already cut has the right number of microbatches."""
    return Batch(
        check_microbatches("args", args, tuple, num_microbatches),
        check_microbatches("kwargs", kwargs, dict, num_microbatches),
        [] if targets is None else check_microbatches("targets", targets, object, num_microbatches),
        loss_kwargs or {},
    )

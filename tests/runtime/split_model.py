"""Runs a list of modules as a pipeline of local ranks, and as one model."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock import LocalGroup, Pipeline, PipelineStage, Schedule, local_ranks
from penstock.stage.outputs import as_arguments

CPU = torch.device("cpu")


def squared_error(output: Any, target: Any) -> Tensor:
    """A loss that takes any output: the sum of the squares of what is a floating tensor."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if _is_floating(leaf)]
    total = sum(((leaf.abs() - 0.5) ** 2).sum() for leaf in tensors)
    return total if target is None else total + ((tensors[0] - target) ** 2).sum()  # type: ignore[return-value]


def make_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    generator = penstock.schedules.get(name)
    v = 1 if generator.takes_any_stages_per_rank else generator.stages_per_rank
    return generator(
        num_ranks=num_stages // v, num_microbatches=num_microbatches, stages_per_rank=v
    )


def make_stages(group: LocalGroup, schedule: Schedule, modules: Sequence[nn.Module], **kwargs: Any):  # type: ignore[no-untyped-def]
    """The stages of this rank, one of each module that the schedule places there."""
    return [
        PipelineStage(modules[index], index, len(modules), CPU, group=group, **kwargs)
        for index in schedule.placement.stages_of(group.rank)
    ]


@dataclass
class Outcome:
    """What training left behind: gradients by stage and name, and what the steps returned."""

    grads: list[dict[str, Tensor | None]]
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def run_pipeline(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    batch: tuple[Any, ...],
    *,
    loss_fn: Callable[..., Any] | None = squared_error,
    num_steps: int = 2,
    kwargs: dict[str, Any] | None = None,
    stage_kwargs: dict[str, Any] | None = None,
) -> Outcome:
    """Steps over one batch, with gradients added up and as sums over the microbatches."""
    own = copy.deepcopy(list(modules))

    def main(group: LocalGroup) -> tuple[list[Any], list[Any]]:
        stages = make_stages(group, schedule, own, **(stage_kwargs or {}))
        pipeline = Pipeline(stages, schedule, loss_fn=loss_fn, scale_grads=False)
        losses: list[Any] = []
        outputs: list[Any] = []
        for _ in range(num_steps):
            found: list[Any] = []
            outputs.append(pipeline.step(*batch, losses=found, **(kwargs or {})))
            losses += found
        return losses, outputs

    results = local_ranks(schedule.num_ranks, main)
    last = schedule.placement.ranks[-1]
    return Outcome(_grads(own), *results[last])


def run_whole(
    modules: Sequence[nn.Module],
    batch: tuple[Any, ...],
    num_microbatches: int,
    *,
    loss_fn: Callable[..., Any] | None = squared_error,
    num_steps: int = 2,
    kwargs: dict[str, Any] | None = None,
) -> Outcome:
    """The same without a pipeline."""
    own = copy.deepcopy(list(modules))
    outcome = Outcome([])
    for _ in range(num_steps):
        args_split, kwargs_split = penstock.split_args_kwargs_into_chunks(
            batch, kwargs, num_microbatches
        )
        merged = []
        for args, some in zip(args_split, kwargs_split, strict=True):
            value: Any = args
            for module in own:
                value = module(*as_arguments(value), **some)
            merged.append(torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, value))
            if loss_fn is not None:
                loss = loss_fn(value, None)
                outcome.losses.append(loss.detach())
                if loss.requires_grad:
                    loss.backward()
        outcome.outputs.append(penstock.merge_chunks(merged))
    outcome.grads = _grads(own)
    return outcome


def assert_same(expected: Outcome, actual: Outcome) -> None:
    """The additions of a gradient may come in another order, so not to the last bit."""
    close = {"rtol": 1e-10, "atol": 1e-12}
    for stage, (wanted, found) in enumerate(zip(expected.grads, actual.grads, strict=True)):
        assert wanted.keys() == found.keys()
        for name, grad in wanted.items():
            place = f"stage {stage}, {name}"
            if grad is None or found[name] is None:
                # A pipeline sends zeros where another microbatch or step has a gradient.
                assert grad is None or not grad.any(), place
                assert found[name] is None or not found[name].any(), place  # type: ignore[union-attr]
            else:
                torch.testing.assert_close(
                    found[name], grad, msg=lambda m, p=place: f"{p}: {m}", **close
                )
    torch.testing.assert_close(actual.losses, expected.losses, **close)
    wanted_leaves, wanted_tree = torch.utils._pytree.tree_flatten(expected.outputs)
    found_leaves, found_tree = torch.utils._pytree.tree_flatten(actual.outputs)
    assert wanted_tree == found_tree
    for one, other in zip(wanted_leaves, found_leaves, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(other, one, **close)
        else:
            assert one == other


def _grads(modules: Sequence[nn.Module]) -> list[dict[str, Tensor | None]]:
    return [{n: p.grad for n, p in module.named_parameters()} for module in modules]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
